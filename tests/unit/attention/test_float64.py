"""Float64 layers compute entirely in float64, and every layer refuses an empty sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megakernel.attention import AttentionInputs, build
from tests.unit.attention import mechanisms
from tests.unit.attention.mechanisms import (
    DIRECTIONS,
    HEADS,
    KV_HEADS,
    POINTS,
    SMALL,
    WIDTH,
    by_tier,
    gradients,
    tokens,
)

UNEVEN = SMALL | {"block": {"block_size": 7, "rank": 3}, "pool": {"block_size": 7}}
"""Sizes whose quotients float32 cannot represent."""

every_direction = pytest.mark.parametrize(("name", "causal"), by_tier(DIRECTIONS))


class LowPrecisionOperations(TorchDispatchMode):
    """Collects the operations that return a floating-point tensor below float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        leaves = (x for x in tree_leaves(result) if isinstance(x, Tensor))
        if any(x.is_floating_point() and x.dtype != torch.float64 for x in leaves):
            self.found.add(str(operation))
        return result


@every_direction
def test_a_float64_layer_never_uses_float32_and_equals_its_reference(name, causal, monkeypatch):
    monkeypatch.setattr(mechanisms, "SMALL", UNEVEN)
    monkeypatch.setitem(mechanisms.TREES, name, mechanisms.small(POINTS[name]))
    module = mechanisms.layer(name, causal=causal).eval()
    q, k, v = tokens(2, 16)
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[1, 11:] = False
    with LowPrecisionOperations() as low_precision:
        out = module(q, k, v, AttentionInputs(padding_mask=mask))
        found = gradients(module, out, q, k, v)
    assert not low_precision.found
    monkeypatch.setenv("MEGAKERNEL_BACKEND", "reference")
    expected = module(q, k, v, AttentionInputs(padding_mask=mask))
    for actual, expected_gradient in zip((out, *found), (expected, *gradients(module, expected, q, k, v))):
        torch.testing.assert_close(actual, expected_gradient, rtol=1e-9, atol=1e-9)


@every_direction
def test_an_empty_sequence_is_refused(name, causal):
    module = build(
        mechanisms.TREES[name],
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        causal=causal,
        max_positions=8,
    )
    q, k = torch.zeros(1, HEADS, 0, WIDTH), torch.zeros(1, KV_HEADS, 0, WIDTH)
    empty = torch.zeros(1, 0, dtype=torch.int64)
    calls = [lambda: module(q, k, k), lambda: module(q, k, k, AttentionInputs(padding_mask=empty.bool()))]
    calls += [lambda: module(q, k, k, AttentionInputs(positions=empty))] + [
        lambda: module.extend(q, k, k)
    ] * causal
    for call in calls:
        with pytest.raises(ValueError, match=r"q has shape \(1, 4, 0, 6\); expected at least one token"):
            call()
