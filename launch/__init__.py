"""The command line and the launchers of a run's processes: local ranks and Slurm jobs."""
