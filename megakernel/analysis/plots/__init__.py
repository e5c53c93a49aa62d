"""What a trained model does, the papers' way: numbers as rows of a table, and plots that are drawn from the rows.

`catalogue.py` names the analyses, their functions `measure_NAME(subject) -> rows` and their plots. `run.py` does
them for a checkpoint, `live.py` some of them for a model in training.
"""
