"""Baselines of the papers that compute few weights exactly: BigBird, Informer and Reformer."""

BITS = 31
"""Bits of a random number. Integers choose the same rows on every device and in every dtype."""
