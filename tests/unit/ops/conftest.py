from importlib import import_module

import pytest

from megakernel.ops import decay
from megakernel.ops import landmark_attention as landmark
from megakernel.ops.flurka_attention import chunked as flurka
from megakernel.ops.kernel_attention import chunked as kernel
from megakernel.ops.softmax_attention import partial
from megakernel.ops.weighted_attention import streamed as weighted
from megakernel.papers.flurka import eva_attention as eva

softmax, window = (import_module(f"megakernel.ops.{name}_attention") for name in ("softmax", "window"))
"""The modules, because the attributes of `megakernel.ops` with these names are functions."""


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 4 tokens and groups of 8, so that a short sequence crosses many of their edges."""
    for module in (decay, kernel):
        monkeypatch.setattr(module, "CHUNK", 4)
    for module in (decay, kernel, flurka, window):
        monkeypatch.setattr(module, "GROUP", 8)
    monkeypatch.setattr(flurka, "RUN", 8)
    monkeypatch.setattr(softmax, "BLOCK", 8)
    for module in (partial, weighted):
        monkeypatch.setattr(module, "QUERIES", 4)
        monkeypatch.setattr(module, "KEYS", 8)


@pytest.fixture
def short_groups(monkeypatch):
    """Groups of 256 tokens instead of 1,024 to 4,096, with the usual chunks: 600 tokens end in the third group."""
    for module in (decay, eva, flurka, kernel, landmark, window):
        monkeypatch.setattr(module, "GROUP", 256)
