"""Megakernel: long-context language models with kernelized and FLuRKA attention.

An attention layer for a model of your own: `megakernel.layers.MultiheadAttention` (docs/library.md). A mechanism over
(B, H, N, d): `megakernel.attention.build`. Commands: `megakernel --help`.
"""

__version__ = "0.1.0"
