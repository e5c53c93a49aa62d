"""Analyses of trained models, as in the papers: tables of numbers, and plots drawn from their rows.

`catalogue.py` lists the analyses with the paths of their functions `measure_NAME(subject) -> rows`, which may be in
`megakernel/papers/`, and plots. `run.py` runs them on a checkpoint, `live.py` some of them on a model in training.
"""
