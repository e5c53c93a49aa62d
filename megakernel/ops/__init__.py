"""Attention as tensor functions, each with a readable reference and a fast implementation."""

from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.softmax_attention import SoftmaxState, softmax_attention
from megakernel.ops.state import KernelState, merge
from megakernel.ops.weighted_attention import WeightedState, weighted_attention
from megakernel.ops.window import Tail
from megakernel.ops.window_attention import window_attention

__all__ = [
    "FlurkaState",
    "KernelState",
    "SoftmaxState",
    "Tail",
    "WeightedState",
    "flurka_attention",
    "kernel_attention",
    "merge",
    "softmax_attention",
    "weighted_attention",
    "window_attention",
]
