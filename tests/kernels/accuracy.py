"""How far kernels may be from the float64 reference."""

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""RMS error over RMS: sums of hundreds of float32 numbers; a few roundings to the 8 bits of bfloat16."""


def error(fast: Tensor, exact: Tensor) -> float:
    """||fast - exact|| / ||exact||, NaN where a number was never written."""
    fast, exact = fast.detach().double(), exact.detach().double()
    return float((fast - exact).norm() / exact.norm().clamp(min=1e-30))


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that `dtype` holds exactly."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(dtype).to(DEVICE)
