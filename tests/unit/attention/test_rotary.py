"""Rotary frequencies against those of `transformers`, and rotation."""

import math

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megakernel.attention.rotary import Rotary, frequencies
from megakernel.config import RopeScaling

WIDTH, BASE, ORIGINAL = 64, 500_000.0, 8192

SCALINGS = {
    "linear": {"factor": 8.0},
    "yarn": {"factor": 16.0, "original_seq_len": ORIGINAL},
    "yarn with its options": {
        "kind": "yarn",
        "factor": 4.0,
        "original_seq_len": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 0.9,
    },
    "yarn of a short original": {"kind": "yarn", "factor": 4.0, "original_seq_len": 64},
    "yarn between pairs": {"kind": "yarn", "factor": 4.0, "original_seq_len": 4096, "truncate": False},
    "llama3": {"factor": 8.0, "original_seq_len": ORIGINAL},
    "llama3 with its options": {
        "kind": "llama3",
        "factor": 32.0,
        "original_seq_len": 4096,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
    },
}


def frequencies_in_transformers(kind: str, keys: dict, width: int, base: float, seq_len: int | None = None):
    """Frequencies and attention factor of `transformers`."""
    named = {"original_seq_len": "original_max_position_embeddings"}
    config = PreTrainedConfig(
        hidden_size=width,
        num_attention_heads=1,
        head_dim=width,
        max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": base,
            **{named.get(key, key): value for key, value in keys.items()},
        },
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)


def scaling_and_keys(name: str) -> tuple[RopeScaling, dict]:
    keys = {"kind": name} | SCALINGS[name]
    scaling = RopeScaling(**keys)
    keys.pop("kind")
    if scaling.kind == "llama3":  # its defaults, which `transformers` requires
        keys = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | keys
    return scaling, keys


@pytest.mark.parametrize("base", [10_000.0, BASE])
@pytest.mark.parametrize("width", [16, WIDTH, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_those_of_transformers(name, width, base):
    scaling, keys = scaling_and_keys(name)
    found, length = frequencies(width, base, scaling)
    expected, attention_factor = frequencies_in_transformers(scaling.kind, keys, width, base)
    # `transformers` uses float32: powers of the base are off by a few units in the last place.
    torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=0)
    assert length == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
def test_ntk_equals_dynamic_scaling_at_a_fixed_length(factor):
    found, length = frequencies(WIDTH, BASE, RopeScaling(kind="ntk", factor=factor))
    expected, _ = frequencies_in_transformers(
        "dynamic", {"factor": 1.0}, WIDTH, BASE, seq_len=int(factor * ORIGINAL)
    )
    torch.testing.assert_close(found, expected.double(), rtol=2e-6, atol=0)
    assert length == 1.0


def test_ntk_keeps_the_fastest_frequency_and_divides_the_slowest_by_the_factor():
    plain, _ = frequencies(WIDTH, BASE, RopeScaling())
    found, _ = frequencies(WIDTH, BASE, RopeScaling(kind="ntk", factor=8.0))
    assert found[0] == plain[0] == 1.0
    assert plain[-1] / found[-1] == pytest.approx(8.0, rel=1e-12)


def test_linear_scaling_is_rotation_at_fractional_positions():
    x, positions = torch.randn(1, 1, 12, WIDTH, dtype=torch.float64), torch.arange(12)[None]
    scaled = Rotary(WIDTH, BASE, RopeScaling(kind="linear", factor=4.0))
    torch.testing.assert_close(scaled(x, positions), Rotary(WIDTH, BASE)(x, positions / 4))


def test_yarn_scales_logits_by_the_square_of_its_attention_factor():
    factor = 4.0
    rotary = Rotary(WIDTH, BASE, RopeScaling(kind="yarn", factor=factor, original_seq_len=ORIGINAL))
    x, start = torch.randn(1, 1, 1, WIDTH, dtype=torch.float64), torch.zeros(1, 1)
    logit = (rotary(x, start) * rotary(x, start)).sum()
    torch.testing.assert_close(logit, (x * x).sum() * (0.1 * math.log(factor) + 1) ** 2)


def test_ntk_needs_more_than_one_frequency():
    with pytest.raises(ValueError, match=r"head_dim=2: .*take kind linear"):
        Rotary(2, BASE, RopeScaling(kind="ntk", factor=2.0))


ROTARIES = {
    "plain": Rotary(WIDTH),
    "longer vectors": Rotary(WIDTH, scaling=RopeScaling(kind="yarn", factor=4.0, original_seq_len=64)),
    "half of a head": Rotary(WIDTH // 2),
}


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("last", [0, 70, 10**6])
def test_keys_rotated_relative_to_the_last_position_give_the_same_logits(rotary, last):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, count, WIDTH, generator=draw, dtype=torch.float64) for count in (1, 70))
    positions = torch.arange(last - 69, last + 1)[None]
    expected = rotary(q, positions[:, -1:]) @ rotary(k, positions).transpose(2, 3)
    torch.testing.assert_close(q @ rotary.relative_to_last(k).transpose(2, 3), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
def test_a_single_token_is_rotated_as_within_a_sequence(rotary):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, WIDTH, generator=draw) for heads in (4, 2))
    rows = torch.tensor([[4, 5, 6], [70, 71, 72]])
    whole = rotary.rotate_qk(q, k, rows)
    for index in range(3):
        token = rotary.rotate_qk(*(x[:, :, index, None] for x in (q, k)), rows[:, index, None])
        torch.testing.assert_close(token, tuple(x[:, :, index, None] for x in whole))
    same_position = rotary.rotate_qk(q[:, :, :1], k[:, :, :1], 4)
    torch.testing.assert_close(same_position[0][0], whole[0][0, :, :1])


@pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES)
@pytest.mark.parametrize("positions", [7, torch.arange(7, 12)[None]], ids=["number", "tensor"])
def test_all_layers_of_a_micro_batch_save_one_table_of_angles(rotary, positions):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 5, WIDTH, generator=draw, requires_grad=True) for heads in (4, 2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.untyped_storage().data_ptr()), lambda x: x
    ):
        first = rotary.rotate_qk(q, k, positions)
        tables = set(saved)
        second = rotary.rotate_qk(q, k, positions)
    assert set(saved) == tables
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    expected = tuple(rotary(x, torch.arange(7, 12)[None]) for x in (q, k))
    torch.testing.assert_close(first, expected, rtol=0, atol=0)


def test_the_table_of_angles_is_replaced_for_other_positions():
    rotary, q = Rotary(WIDTH), torch.ones(1, 1, 3, WIDTH)
    for positions in (0, 5, torch.tensor([[5, 6, 0]]), torch.tensor([[5, 6, 7]])):
        expected_positions = (
            positions if isinstance(positions, torch.Tensor) else torch.arange(positions, positions + 3)[None]
        )
        torch.testing.assert_close(
            rotary.rotate_qk(q, q, positions)[0], rotary(q, expected_positions), rtol=0, atol=0
        )
    assert rotary.rotate_qk(q.double(), q.double(), 5)[0].dtype == torch.float64
    assert rotary.rotate_qk(q[:, :, :2], q[:, :, :2], 5)[0].shape[2] == 2
