"""Attention as tensor functions: a readable reference and a fast version of each, behind one function."""

from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.state import KernelState, merge

__all__ = ["KernelState", "kernel_attention", "merge"]
