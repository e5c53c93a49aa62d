"""Causal FLuRKA from its formula, block by block and query by query; what the other backends are compared with."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import wide
from megakernel.ops.documents import Positions, open_documents, position_rows
from megakernel.ops.flurka_attention.form import Form, Weights
from megakernel.ops.kernel_attention.reference import phi
from megakernel.ops.state import Exchange, KernelState
from megakernel.ops.window import Tail
