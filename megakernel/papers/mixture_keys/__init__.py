"""Transformer-MGK: a Gaussian similarity and mixtures of keys over all pairs, their likelihoods and costs."""
