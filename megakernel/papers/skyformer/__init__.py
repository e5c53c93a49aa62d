"""Skyformer: Nyström approximations by landmarks of a whole sequence, and the paper's measurements of them."""
