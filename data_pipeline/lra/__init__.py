"""The tasks of the Long Range Arena (Tay et al. 2021): two that are generated, three that are read."""
