"""The FLOP formulas against the FLOPs that torch counts.

The chunked ops execute exactly the formulas and three known extras: whole blocks where the mechanism uses half of them,
pairs inside a chunk of the scan, and the product that adds states.
"""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megakernel.attention import build
from megakernel.config import Attention, Model
from megakernel.config.mechanisms import LayerShape
from megakernel.model.flops import attention_flops
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.flurka_attention.chunked import GROUP as FLURKA_GROUP
from megakernel.ops.flurka_attention.chunked import RUN
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.kernel_attention.chunked import CHUNK, GROUP
from megakernel.ops.window_attention import window_attention
from megakernel.papers.skyformer.nystrom_attention import depthwise_convolution, nystrom_attention
from megakernel.papers.skyformer.skyformer_attention import skyformer_attention

HEADS, HEAD_DIM = 4, 16
PROJECTIONS = {
    "elu": None,
    "hedgehog": torch.zeros(HEAD_DIM, HEAD_DIM),
    "favor": torch.zeros(2 * HEAD_DIM, HEAD_DIM),
}


def model(attention: str | dict, kv_heads: int = HEADS) -> Model:
    sizes = {"num_layers": 1, "hidden_size": 64, "num_heads": HEADS, "num_kv_heads": kv_heads}
    return Model.model_validate({**sizes, "attention": attention})


def tensors(seq_len: int, kv_heads: int = HEADS) -> list[torch.Tensor]:
    return [torch.zeros(1, heads, seq_len, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]


def needed(settings: Model, seq_len: int) -> dict[str, float]:
    return attention_flops(settings, settings.attention, seq_len)


def executed_per_token(seq_len: int, run: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops() / seq_len


def scan_extras(seq_len: int, group: int, chunk: int, keys: int, features: int, kv_heads: int) -> float:
    """Pairs of a query with the `keys` of its chunk, and the product of states, per token."""
    group = min(group, seq_len)
    states = group // chunk + 1
    pairs = HEADS * keys * (2 * features + 2 * (HEAD_DIM + 1))
    return pairs + kv_heads * 2 * states**2 * features * (HEAD_DIM + 1) / group


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_len", [2 * CHUNK, 2 * GROUP])
@pytest.mark.parametrize(
    ("preset", "feature_map"), [("linear", "elu"), ("hedgehog", "hedgehog"), ("performer", "favor")]
)
def test_kernel_attention_executes_the_formula_and_the_scan(preset, feature_map, seq_len, kv_heads):
    settings = model(preset, kv_heads)
    assert settings.attention.feature_map is not None
    features = settings.attention.feature_map.width(HEAD_DIM)
    executed = executed_per_token(
        seq_len,
        lambda: kernel_attention(
            *tensors(seq_len, kv_heads),
            feature_map=feature_map,
            projection=PROJECTIONS[feature_map],
            backend="chunked",
        ),
    )
    extras = scan_extras(seq_len, GROUP, CHUNK, CHUNK, features, kv_heads)
    assert executed == sum(needed(settings, seq_len).values()) + extras


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seq_len", [2 * RUN, 2 * FLURKA_GROUP])
@pytest.mark.parametrize("near", ["softmax", "kernel"])
@pytest.mark.parametrize("keys", [1, 3])
def test_flurka_executes_the_formula_whole_blocks_and_the_scan(keys, near, seq_len, kv_heads):
    mixture = {"mixture": {"keys": keys}} if keys > 1 else {}
    settings = model({"preset": {"softmax": "flurka", "kernel": "flurka_kernel"}[near], **mixture}, kv_heads)
    parts = needed(settings, seq_len)
    parts.pop("gate", None)  # the layer computes it, not the op
    block, rank, features = 64, 8, 2 * HEAD_DIM
    pool = torch.zeros(rank, block)
    q, k, v = tensors(seq_len, kv_heads)
    executed = executed_per_token(
        seq_len,
        lambda: flurka_attention(
            q,
            k if keys == 1 else k[:, :, None].expand(-1, -1, keys, -1, -1),
            v,
            priors=torch.ones(kv_heads, keys) if keys > 1 else None,
            feature_map="hedgehog",
            projection=PROJECTIONS["hedgehog"],
            pool_keys=pool,
            pool_values=pool,
            near=near,
            backend="chunked",
        ),
    )
    scores = keys * HEAD_DIM if near == "softmax" else features
    whole_blocks = HEADS * block * (2 * scores + 2 * (HEAD_DIM + 1)) - parts["near"]
    extras = scan_extras(seq_len, FLURKA_GROUP, RUN, RUN // block * rank, features, kv_heads)
    assert executed == sum(parts.values()) + whole_blocks + extras


def test_window_attention_executes_whole_blocks_and_a_column_for_the_normalizer():
    executed = executed_per_token(1024, lambda: window_attention(*tensors(1024), block_size=64))
    pair = 2 * HEAD_DIM + 2 * HEAD_DIM
    assert executed == sum(needed(model("local"), 1024).values()) * 64 / 32.5 * (pair + 2) / pair


def test_torch_executes_both_halves_of_causal_softmax():
    q, k, v = tensors(128)
    executed = executed_per_token(128, lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ v)
    assert executed == sum(needed(model("softmax"), 128).values()) * 128 / 64.5


LANDMARKS, ROW = 12, 96


def landmark_parts(name: str, **settings) -> dict[str, float]:
    """FLOPs per token of one head of an encoder."""
    config = Attention.model_validate({"mechanism": name, name: settings})
    return config.spec.flops(LayerShape(1, 1, HEAD_DIM, HEAD_DIM, causal=False, seq_len=ROW))


@pytest.fixture
def head():
    return [torch.randn(1, 1, ROW, HEAD_DIM) for _ in range(3)]


def test_skyformer_executes_the_formula(head):
    rows = torch.arange(LANDMARKS)
    parts = landmark_parts("skyformer", features=LANDMARKS)
    assert executed_per_token(ROW, lambda: skyformer_attention(*head, landmarks=rows)) == sum(parts.values())


def test_nystromformer_executes_the_formula_and_products_for_the_means(head):
    parts = landmark_parts("nystromformer", landmarks=LANDMARKS)
    segments = torch.arange(ROW)[None] * LANDMARKS // ROW
    means = 2 * 2 * LANDMARKS * HEAD_DIM
    executed = executed_per_token(ROW, lambda: nystrom_attention(*head, segments=segments, count=LANDMARKS))
    assert executed == sum(parts.values()) + means


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bigbird", {"block_size": 8, "random_blocks": 2}),
        ("informer", {"top": 16}),
        ("reformer", {"chunk_size": 8, "buckets": 12, "rounds": 3}),
    ],
)
def test_mechanisms_of_few_weights_execute_the_formula(head, name, settings):
    parts = landmark_parts(name, **settings)
    module = build({"mechanism": name, name: settings}, num_heads=1, head_dim=HEAD_DIM, causal=False)
    assert executed_per_token(ROW, lambda: module(*head)) == sum(parts.values())


def test_a_convolution_executes_the_formula(head):
    parts = landmark_parts("nystromformer", landmarks=LANDMARKS, conv_kernel=5)
    executed = executed_per_token(ROW, lambda: depthwise_convolution(head[2], torch.randn(1, 5)))
    assert executed == parts["convolution"]
