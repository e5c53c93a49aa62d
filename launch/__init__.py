"""The command line, and how the processes of a run start."""
