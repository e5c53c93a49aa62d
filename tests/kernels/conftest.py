import os

import pytest
import torch

from tests.kernels.comparing import DEVICE


@pytest.fixture
def device() -> torch.device:
    """See `comparing.DEVICE`."""
    return torch.device(DEVICE)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Memory that nobody wrote holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def draw() -> torch.Generator:
    """New random numbers in every test; a failure shows the MEGAKERNEL_TEST_SEED that draws them again."""
    given = os.environ.get("MEGAKERNEL_TEST_SEED")
    seed = int(given) if given else int.from_bytes(os.urandom(4))
    print(f"MEGAKERNEL_TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)
