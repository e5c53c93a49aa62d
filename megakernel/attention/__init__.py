"""Attention mechanisms as modules over (B, H, N, d): they own parameters and call megakernel.ops."""

from megakernel.attention.build import build
from megakernel.attention.heads import ALL_HEADS, HeadShard
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer, SequenceState, finish_step
from megakernel.attention.noise import redraw
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import WHOLE_SEQUENCE, ContextParallelShard
