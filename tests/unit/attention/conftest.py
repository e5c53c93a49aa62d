import pytest

from tests.unit.ops.conftest import short_groups, small_chunks

__all__ = ["short_groups", "small_chunks"]


@pytest.fixture(params=["chunked", "reference"])
def each_backend(request, monkeypatch):
    """Runs the test once with each backend that computes on any device."""
    monkeypatch.setenv("MEGAKERNEL_BACKEND", request.param)
