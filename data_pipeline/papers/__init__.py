"""The labeled tasks of the papers' encoders: `tasks.py` lists Long Range Arena, GLUE, and the sparsity task."""
