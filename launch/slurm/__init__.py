"""Jobs: submission to Slurm, batch scripts, preflight, restarts and states."""
