"""What reads and writes weights: a run's checkpoints, models of `transformers`, and what becomes of them here."""
