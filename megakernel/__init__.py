"""Megakernel: long-context language models with kernelized and FLuRKA attention."""

__version__ = "0.1.0"
