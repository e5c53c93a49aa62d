"""The formulas against what torch executes and counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megakernel.analysis.flops import attention_flops, feature_width
from megakernel.config import Model
from megakernel.ops import kernel_attention
from megakernel.ops.kernel_attention.chunked import CHUNK, GROUP

HEADS, HEAD_DIM = 4, 16


def model(attention: str, kv_heads: int) -> Model:
    return Model(num_layers=1, hidden_size=64, num_heads=HEADS, num_kv_heads=kv_heads, attention=attention)


def executed(run) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


def tensors(seq_len: int, kv_heads: int) -> list[torch.Tensor]:
    return [torch.zeros(1, heads, seq_len, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_len", [2 * CHUNK, 2 * GROUP])
@pytest.mark.parametrize(
    ("preset", "feature_map", "projection"),
    [
        ("linear", "elu", None),
        ("hedgehog", "hedgehog", torch.zeros(HEAD_DIM, HEAD_DIM)),
        ("performer", "favor", torch.zeros(2 * HEAD_DIM, HEAD_DIM)),
    ],
)
def test_the_chunked_op_executes_the_formula_and_its_two_known_extras(
    preset, feature_map, projection, seq_len, kv_heads
):
    settings = model(preset, kv_heads)
    assert settings.attention.feature_map is not None
    features = feature_width(settings.attention.feature_map, HEAD_DIM)
    needed = sum(attention_flops(settings, settings.attention, seq_len).values()) * seq_len

    group = min(seq_len, GROUP)
    states = group // CHUNK + 1
    within_chunks = seq_len * HEADS * CHUNK * (2 * features + 2 * (HEAD_DIM + 1))
    between_chunks = seq_len // group * kv_heads * 2 * states**2 * features * (HEAD_DIM + 1)

    counted = executed(
        lambda: kernel_attention(
            *tensors(seq_len, kv_heads), feature_map=feature_map, projection=projection, backend="chunked"
        )
    )
    assert counted == needed + within_chunks + between_chunks


def test_torch_executes_both_halves_of_causal_softmax():
    seq_len = 128
    settings = model("softmax", HEADS)
    q, k, v = tensors(seq_len, HEADS)
    counted = executed(lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ v)
    needed = sum(attention_flops(settings, settings.attention, seq_len).values()) * seq_len
    assert counted == needed * 2 * seq_len / (seq_len + 1)
