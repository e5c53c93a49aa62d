from contextlib import nullcontext

import pytest
import torch

from tests.kernels.comparing import DEVICE
from tests.kernels.interpreter import faster


@pytest.fixture
def device() -> torch.device:
    """See `comparing.DEVICE`."""
    return torch.device(DEVICE)


@pytest.fixture(scope="package", autouse=True)
def faster_interpreter():
    with nullcontext() if DEVICE == "cuda" else faster():
        yield


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialized memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
