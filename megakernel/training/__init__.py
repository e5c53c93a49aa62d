"""Training: schedule, run folder, checkpoints, stop requests, metrics, and the loop that uses them."""
