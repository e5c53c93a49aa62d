"""The place that the code of older exported models imports their classes from, and looks for before it does."""

from megakernel.checkpoint.pretrained import MegakernelConfig, MegakernelForCausalLM

__all__ = ["MegakernelConfig", "MegakernelForCausalLM"]
