"""Property 8 of docs/formulas.md, section 8: bf16 inputs of scale 10, sequences of 16 to 65,536 tokens."""

import pytest
import torch
from torch import Tensor

from megakernel.attention import AttentionInputs, AttentionLayer, build
from megakernel.attention.low_rank import LowRankAttention
from megakernel.config.attention import PRESETS, Attention
from tests.tiers import tiered
from tests.unit.attention.mechanisms import (
    DIRECTIONS,
    POINTS,
    SMALL,
    Sizes,
    by_tier,
    may_divide_by_zero,
    sized,
    with_further,
)

TOKENS, WIDTH = 65_536, 16
every_length = pytest.mark.parametrize("length", tiered([8192, TOKENS], [8192]))
LAST_QUERIES = 64
"""Number of queries that see the whole sequence in mechanisms of quadratic cost."""

LONG: Sizes = {key: {} for key in SMALL} | {
    "block": {"rank": 2},
    "linformer": {"rank": 64},
    "eva": {"chunk_size": 64},
}
"""Default sizes, but a quarter of the landmarks, since every query may see every landmark."""

CONFIGS = {name: Attention.model_validate(sized(tree, LONG)) for name, tree in POINTS.items()}


def is_tested(name: str) -> bool:
    """Presets, and variants of linear cost; none whose denominators may be rounding errors."""
    config = CONFIGS[name]
    chooses_by_token = config.selection is not None and config.selection.unit == "token"
    if may_divide_by_zero(config) or chooses_by_token:
        return False
    return name in PRESETS or config.similarity == "kernel"


every_direction = pytest.mark.parametrize(
    ("name", "causal"), by_tier((name, causal) for name, causal in DIRECTIONS if is_tested(name))
)


def random_layer(config: Attention, causal: bool, length: int) -> AttentionLayer:
    """A layer of one head with bf16 parameters, away from values at which gates and token counts have no effect."""
    module = build(
        config, num_heads=1, head_dim=WIDTH, causal=causal, max_positions=max(length, 1024), rotary=False
    )
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw)
    return with_further(module).bfloat16().eval()


def inputs(config: Attention, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of scale 10; k and v have the shapes that the mechanism expects from the projections."""
    draw = torch.Generator().manual_seed(0)
    count = length
    if config.compresses_input:
        assert config.compression is not None
        blocks = -(-length // getattr(config.compression, "block_size", length))
        count = blocks * getattr(config.compression, "rank", 1)
    keys = (config.keys_per_head,) if config.keys_per_head > 1 else ()
    shapes = ((length,), (*keys, count), (count,))
    q, k, v = (10 * torch.randn(1, 1, *shape, WIDTH, generator=draw).bfloat16() for shape in shapes)
    return q, k, v


def positions_of_last_queries(length: int) -> Tensor:
    """Positions (1, N) by which only the last queries see the sequence; every other token is its own document.

    So N * LAST_QUERIES of the N^2 pairs are computed, with every key among them.
    """
    positions = torch.zeros(1, length, dtype=torch.int64)
    positions[:, -LAST_QUERIES:] = torch.arange(length - LAST_QUERIES, length)
    return positions


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Within 2e-2 of each number, or of the standard deviation where terms cancel: bf16 keeps 8 bits of an output.

    Below its smallest normal number it keeps none.
    """
    assert out.isfinite().all()
    least = torch.finfo(out.dtype).tiny
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 * expected.std().item() + least)


@every_direction
@every_length
@torch.no_grad()
def test_large_inputs_on_long_sequences_are_close_to_float64(name, causal, length):
    config = CONFIGS[name]
    module, qkv = random_layer(config, causal, length), inputs(config, length)
    positions = positions_of_last_queries(length) if config.weighs_every_pair else None
    layer_inputs = AttentionInputs(positions)
    out = module(*qkv, layer_inputs)
    expected = module.double()(*(x.double() for x in qkv), layer_inputs)
    compared = slice(None if positions is None else -LAST_QUERIES, None)
    assert_near(out[:, :, compared], expected[:, :, compared])


@every_direction
@torch.no_grad()
def test_large_inputs_on_short_sequences_are_close_to_float64(name, causal):
    config = CONFIGS[name]
    for length in (16, 64, 256, 1024):
        module, qkv = random_layer(config, causal, length), inputs(config, length)
        out = module(*qkv)
        assert_near(out, module.double()(*(x.double() for x in qkv)))


@pytest.mark.parametrize("name", [name for name in PRESETS if CONFIGS[name].compresses_input])
@every_length
@torch.no_grad()
def test_landmarks_of_large_inputs_are_close_to_float64(name, length):
    module = random_layer(CONFIGS[name], causal=False, length=length)
    assert isinstance(module, LowRankAttention)
    x = 10 * torch.randn(length, 1, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = module.compress(x, first=0, length=length)
    assert_near(out, module.double().compress(x.double(), first=0, length=length))


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.feature_map is not None])
def test_parameters_of_feature_maps_stay_in_full_precision(name):
    """With 8 bits per frequency, an exponent of 300 would be off by 0.6."""
    module = build(
        CONFIGS[name],
        num_heads=1,
        head_dim=WIDTH,
        causal=not CONFIGS[name].mixes_future_tokens,
        max_positions=8,
    )
    before = {key: value.clone() for key, value in module.projection.state_dict().items()}
    after = module.bfloat16().projection.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
