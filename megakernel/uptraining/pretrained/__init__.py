"""Compatibility module: the code of older exported models checks for it and imports their classes from it."""

from megakernel.checkpoint.pretrained import MegakernelConfig, MegakernelForCausalLM

__all__ = ["MegakernelConfig", "MegakernelForCausalLM"]
