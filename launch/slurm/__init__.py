"""Jobs: what is submitted, how it is told to Slurm, and what became of it."""
