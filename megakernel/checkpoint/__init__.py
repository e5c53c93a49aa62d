"""Reading, writing and converting weights: checkpoints of runs, models of `transformers`, exports."""
