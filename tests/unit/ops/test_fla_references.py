"""Ops with decaying states agree with the reference functions of flash-linear-attention, which compute in float32."""

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from megakernel.attention import AttentionInputs, build
from megakernel.ops.gated_delta_rule import gated_delta_rule
from megakernel.ops.simple_gla import simple_gla

pytestmark = pytest.mark.second  # importing the library takes seconds

BATCH, HEADS, LENGTH, WIDTH, VALUES = 2, 3, 140, 8, 6


@pytest.fixture
def tensors():
    """q, k of norm 1, v, log decays, strengths and a state, float64; heads before tokens, as in our ops."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((LENGTH, WIDTH), (LENGTH, WIDTH), (LENGTH, VALUES), (LENGTH,), (LENGTH,), (WIDTH, VALUES))
    drawn = (torch.randn(BATCH, HEADS, *shape, generator=draw, dtype=torch.float64) for shape in shapes)
    q, k, v, decay, strength, state = drawn
    return q, normalize(k, dim=-1), v, logsigmoid(decay), strength.sigmoid(), state


def theirs(*tensors):
    """Tensors with tokens before heads, as in flash-linear-attention."""
    return [x.transpose(1, 2) for x in tensors]


def check(ours, expected):
    for found, of in zip(ours, expected):
        torch.testing.assert_close(found, of.to(found.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_simple_gla_equals_flash_linear_attention(tensors, backend):
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    q, k, v, decay, _, state = tensors
    out, left = naive_recurrent_simple_gla(*theirs(q, k, v, decay), initial_state=state.float())
    check(
        simple_gla(q, k, v, decay, positions=1, initial_state=state, backend=backend),
        (out.transpose(1, 2), left),
    )


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_the_gated_delta_rule_equals_flash_linear_attention(tensors, backend):
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k, v, decay, strength, state = tensors
    out, left = naive_recurrent_gated_delta_rule(
        *theirs(q, k, v, strength, decay), initial_state=state, output_final_state=True
    )
    ours = gated_delta_rule(q, k, v, decay, strength, positions=1, initial_state=state, backend=backend)
    check(ours, (out.transpose(1, 2), left))


def test_a_fixed_decay_per_head_equals_retention(tensors):
    from fla.ops.retention.naive import naive_retention

    q, k, *_ = tensors
    config = {"mechanism": "simple_gla", "simple_gla": {"decay": "fixed"}}
    layer = build(config, num_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH).double()
    out = layer(q, k, k, AttentionInputs(torch.arange(LENGTH).expand(BATCH, -1)))
    check([out], [naive_retention(q, k, k)])
