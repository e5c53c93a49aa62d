"""What a trained model does, the papers' way: numbers as rows of a table, and plots that are drawn from the rows.

`catalogue.py` names the analyses and their plots; each is a module with `measure(subject) -> rows`. `run.py` does them
for a checkpoint, `live.py` some of them for a model in training.
"""
