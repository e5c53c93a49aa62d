"""EVA against outputs of its authors' code, in float64."""

import pytest
import torch

from megakernel.attention import AttentionInputs, build
from megakernel.papers.flurka.eva import ChunkSummarizer
from tests.oracles import KEPT, arrays, assert_equal, heads, joined

pytestmark = pytest.mark.usefixtures("each_backend")


def layer(name: str, *, causal: bool, **settings):
    module = build(
        {"preset": "eva", "eva": {"window_size": 16, **settings}}, num_heads=2, head_dim=16, causal=causal
    )
    nets = {"q": module.summaries.queries, "k": module.summaries.keys}
    names = {"weight": "0.weight", "bias": "0.bias", "norm_weight": "1.weight", "norm_bias": "1.bias"}
    for which, net in nets.items():
        for name_here, published_name in names.items():
            getattr(net, name_here).data = arrays(name, f"w.adaptive_mu_{which}.{published_name}")[0]
    return module.double().eval()


def bidirectional(x, mask=None, **settings):
    module = layer("eva_1d", causal=False, chunk_size=16, **settings)
    return _through(module, x, mask, *arrays("eva_1d", "w.qkv.weight", "w.qkv.bias"), "proj", "eva_1d")


def causal(x, mask=None):
    module = layer("eva_causal", causal=True, chunk_size=8)
    parts = [arrays("eva_causal", f"w.{part}_proj.weight", f"w.{part}_proj.bias") for part in "qkv"]
    weight, bias = (torch.cat(side) for side in zip(*parts))
    return _through(module, x, mask, weight, bias, "out_proj", "eva_causal")


def _through(module, x, mask, weight, bias, output, name):
    q, k, v = (heads(part) for part in (x @ weight.T + bias).chunk(3, -1))
    out_weight, out_bias = arrays(name, f"w.{output}.weight", f"w.{output}.bias")
    return joined(module(q, k, v, AttentionInputs(padding_mask=mask))) @ out_weight.T + out_bias


def assert_real(actual, masked, real):
    """Compare real queries only: at padded ones megakernel gives 0."""
    real = real[:, KEPT]
    assert_equal(actual[:, KEPT][real], masked[real])


def test_eva_equals_its_authors():
    x, out = arrays("eva_1d", "x", "out")
    assert_equal(bidirectional(x), out)


def test_published_padding_equals_its_authors():
    x, mask, masked, short = arrays("eva_1d", "x", "mask", "out_masked", "out_x90")
    real = mask.bool()
    assert_real(bidirectional(x, real, published_padding=True), masked, real)
    assert_equal(bidirectional(x[:, :90], published_padding=True), short)


def test_causal_eva_equals_its_authors():
    x, mask, out, masked = arrays("eva_causal", "x", "mask", "out", "out_masked")
    real = mask.bool()
    assert_equal(causal(x), out)
    assert_real(causal(x, real), masked, real)


@pytest.mark.parametrize(("name", "through"), [("eva_1d", bidirectional), ("eva_causal", causal)])
def test_training_adds_the_noise_to_omega(name, through, monkeypatch):
    x, noise, out = arrays(name, "x", "train_noise", "train_out")
    # The published noise differs between sequences; here it is the same for all, so that no layout changes it.
    monkeypatch.setattr(ChunkSummarizer, "noise", lambda *_: noise)
    monkeypatch.setattr(torch.nn.Module, "eval", lambda module: module.train())
    assert_equal(through(x), out)
