import pytest

from megakernel.config import mechanisms
from tests.unit.ops.conftest import short_groups, small_chunks

__all__ = ["short_groups", "small_chunks"]


@pytest.fixture(params=["chunked", "reference"])
def each_backend(request, monkeypatch):
    """Runs the test once with each backend that computes on any device."""
    monkeypatch.setenv("MEGAKERNEL_BACKEND", request.param)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups of two blocks, so that the short sequences of tests have several."""
    monkeypatch.setattr(mechanisms, "BLOCKS_OF_GROUP", 2)
