from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.comparing import DEVICE


@pytest.fixture
def device() -> torch.device:
    """See `comparing.DEVICE`."""
    return torch.device(DEVICE)


@pytest.fixture(scope="package", autouse=True)
def interpreted_language():
    """Patches `triton.language` for the interpreter once for all tests.

    By default the interpreter walks through the language at every call of a device function, thousands of times per
    kernel, although everything is already patched; that took most of the time of these tests.
    """
    if DEVICE == "cuda":
        yield
        return
    replace = interpreter._patch_lang
    replaced = replace(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    yield
    interpreter._patch_lang = replace
    replaced.restore()


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialized memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.ones(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
