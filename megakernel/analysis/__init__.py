"""Plots of trained models, plans of runs, and the catalogue of mechanisms."""
