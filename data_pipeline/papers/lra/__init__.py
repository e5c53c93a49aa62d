"""Tasks of the Long Range Arena (Tay et al. 2021): ListOps and Pathfinder are generated, the others are read."""
