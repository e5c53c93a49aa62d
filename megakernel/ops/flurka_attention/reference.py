"""Causal FLuRKA from its formula, block by block and query by query; what the other backends are compared with."""
