"""Property 8 of docs/formulas.md, 8: bf16 inputs of scale 10 on sequences of 16 to 65,536 tokens."""

import pytest
import torch
from torch import Tensor

from megakernel.attention import AttentionInputs, AttentionLayer, build
from megakernel.attention.low_rank import LowRankAttention
from megakernel.config.attention import PRESETS, Attention
from tests.tiers import tiered
from tests.unit.attention.mechanisms import DIRECTIONS, POINTS, SMALL, Sizes, may_divide_by_zero, sized

TOKENS, WIDTH = 65_536, 16
every_length = pytest.mark.parametrize("length", tiered([8192, TOKENS], [8192]))
LAST = 64
"""Queries that look back over the whole sequence where each query weighs every key."""

LONG: Sizes = {key: {} for key in SMALL} | {
    "block": {"rank": 2},
    "linformer": {"rank": 64},
    "eva": {"chunk_size": 64},
}
"""Sizes as they come, but a quarter of the landmarks, of which every query may meet every one."""

FORMS = {name: Attention.model_validate(sized(tree, LONG)) for name, tree in POINTS.items()}


def is_tested(name: str) -> bool:
    """Presets, and of their variants those of linear cost; none whose denominators are rounding errors."""
    form = FORMS[name]
    if may_divide_by_zero(form):
        return False
    return name in PRESETS or form.similarity == "kernel"


every_direction = pytest.mark.parametrize(
    ("name", "causal"), [(name, causal) for name, causal in DIRECTIONS if is_tested(name)]
)


def moved(form: Attention, causal: bool, length: int) -> AttentionLayer:
    """A layer of one head with bf16 parameters, moved away from where gates and token counts have no effect."""
    module = build(form, num_heads=1, head_dim=WIDTH, causal=causal, max_positions=max(length, 1024))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw)
    return module.bfloat16().eval()


def inputs(form: Attention, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of scale 10, k and v as the mechanism wants them from the projections."""
    draw = torch.Generator().manual_seed(0)
    count = length
    if form.compresses_input:
        assert form.compression is not None
        count = getattr(form.compression, "rank", 1)
    keys = (form.keys_per_head,) if form.keys_per_head > 1 else ()
    shapes = ((length,), (*keys, count), (count,))
    q, k, v = (10 * torch.randn(1, 1, *shape, WIDTH, generator=draw).bfloat16() for shape in shapes)
    return q, k, v


def only_the_last_look_back(length: int) -> Tensor:
    """Positions (1, N) that make a document of every token but the last ones, which begin where the sequence does.

    Every key is there, and of N^2 pairs N * LAST are weighed.
    """
    positions = torch.zeros(1, length, dtype=torch.int64)
    positions[:, -LAST:] = torch.arange(length - LAST, length)
    return positions


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Within 2e-2 of each number, or of what numbers are like where terms cancel: bf16 keeps 8 bits of an output.

    It has none of what is less than its smallest normal number.
    """
    assert out.isfinite().all()
    least = torch.finfo(out.dtype).tiny
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2 * expected.std().item() + least)


@every_direction
@every_length
@torch.no_grad()
def test_large_inputs_on_long_sequences_stay_near_float64(name, causal, length):
    form = FORMS[name]
    module, qkv = moved(form, causal, length), inputs(form, length)
    positions = only_the_last_look_back(length) if form.weighs_every_pair else None
    told = AttentionInputs(positions)
    out = module(*qkv, told)
    expected = module.double()(*(x.double() for x in qkv), told)
    seen = slice(None if positions is None else -LAST, None)
    assert_near(out[:, :, seen], expected[:, :, seen])


@every_direction
@torch.no_grad()
def test_large_inputs_on_short_rows_stay_near_float64(name, causal):
    form = FORMS[name]
    for length in (16, 64, 256, 1024):
        module, qkv = moved(form, causal, length), inputs(form, length)
        out = module(*qkv)
        assert_near(out, module.double()(*(x.double() for x in qkv)))


@pytest.mark.parametrize("name", [name for name in PRESETS if FORMS[name].compresses_input])
@every_length
@torch.no_grad()
def test_landmarks_of_large_inputs_stay_near_float64(name, length):
    module = moved(FORMS[name], causal=False, length=length)
    assert isinstance(module, LowRankAttention)
    x = 10 * torch.randn(length, 1, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = module.compress(x, first=0, length=length)
    assert_near(out, module.double().compress(x.double(), first=0, length=length))


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.feature_map is not None])
def test_what_a_feature_map_learns_stays_in_full_precision(name):
    """8 bits of a frequency would leave an exponent of 300 off by 0.6."""
    module = build(
        FORMS[name], num_heads=1, head_dim=WIDTH, causal=not FORMS[name].mixes_future_tokens, max_positions=8
    )
    before = {key: value.clone() for key, value in module.projection.state_dict().items()}
    after = module.bfloat16().projection.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
