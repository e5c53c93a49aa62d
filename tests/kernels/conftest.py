"""Kernels run in Triton's interpreter where there is no GPU; it must know before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    """`torch.empty` gives NaN, so that a place no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
