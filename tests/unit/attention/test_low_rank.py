"""Properties of bidirectional low-rank attention and EVA."""

import pytest
import torch

from megakernel.attention import AttentionInputs, build
from megakernel.model.compressed_input import padding_last
from tests.unit.attention.mechanisms import (
    CONFIGS,
    TREES,
    WIDTH,
    assert_close,
    layer,
    tokens,
)

# The small trees use `projected` for mechanisms that compress their input by default.
COMPRESSING_INPUT = [
    name for name, config in CONFIGS.items() if getattr(config.compression, "compress", None) == "projected"
]


@pytest.mark.parametrize("name", COMPRESSING_INPUT)
@pytest.mark.parametrize("padded", [False, True])
def test_compressing_before_or_after_projections_without_bias_is_the_same(name, padded):
    """FLuRKA's eqs. 1 and 2: (E X) W = E (X W); the order only affects speed."""
    tree = TREES[name]
    before = dict(tree, compression=dict(tree["compression"], compress="input"))
    sizes = {"num_heads": 2, "head_dim": WIDTH, "causal": False, "max_positions": 64, "seed": 3}
    first, second = (build(config, rotary=False, **sizes).double().eval() for config in (before, tree))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(22, 2, 12, generator=draw, dtype=torch.float64)
    w_q, w_k, w_v = (torch.randn(12, 2 * WIDTH, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 22, generator=draw) > 0.4 if padded else None
    inputs = AttentionInputs(padding_mask=mask)

    def heads(y):
        return y.unflatten(-1, (2, WIDTH)).permute(1, 2, 0, 3)

    landmarks = first.compress(x if mask is None else padding_last(x, mask), first=0, length=22)
    found = first(heads(x @ w_q), heads(landmarks[0] @ w_k), heads(landmarks[-1] @ w_v), inputs)
    assert_close(found, second(heads(x @ w_q), heads(x @ w_k), heads(x @ w_v), inputs))


def test_sequences_longer_than_the_matrices_are_refused():
    module = layer("linformer", causal=False)
    with pytest.raises(ValueError, match=r"sequences of 65 tokens exceed max_positions=64"):
        module(*tokens(1, 65))


def test_landmarks_of_the_whole_sequence_are_refused_in_causal_attention():
    with pytest.raises(ValueError, match="linformer without a near window mixes future tokens"):
        build("linformer", num_heads=2, head_dim=4, max_positions=8)


def test_entries_of_linformers_matrices_have_variance_one_over_rank():
    module = build("linformer", num_heads=2, head_dim=4, causal=False, max_positions=400)
    matrices = module.compressor.matrices
    assert matrices.shape == (2, 256, 400)
    for matrix in matrices:
        # The variance of 102,400 samples is off by 0.4% (one standard deviation).
        assert matrix.var().item() == pytest.approx(1 / 256, rel=0.02)


def test_training_noise_depends_only_on_the_step_and_evaluation_has_none():
    module = layer("eva", causal=False)
    q, k, v = tokens(1, 12)
    module.summaries.redraw(5)
    first = module(q, k, v)
    module.summaries.redraw(6)
    assert not torch.equal(module(q, k, v), first)
    module.summaries.redraw(5)
    assert torch.equal(module(q, k, v), first)
    evaluated = module.eval()(q, k, v)
    module.summaries.redraw(7)
    assert torch.equal(module(q, k, v), evaluated)


def test_eva_with_one_window_over_the_sequence_is_softmax():
    """With the chunks of the exact window excluded, only softmax attention remains."""
    config = {"preset": "eva", "eva": {"window_size": 16, "chunk_size": 4, "exclude_window": True}}
    q, k, v = (x[:, :2] for x in tokens(2, 11))
    sizes = {"num_heads": 2, "head_dim": WIDTH, "causal": False}
    eva, softmax = (build(tree, **sizes).double() for tree in (config, "softmax"))
    assert_close(eva(q, k, v), softmax(q, k, v))
