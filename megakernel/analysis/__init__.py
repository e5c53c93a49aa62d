"""Analysis: what a model costs."""
