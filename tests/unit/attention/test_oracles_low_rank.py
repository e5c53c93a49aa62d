"""Low-rank attention against outputs of published code, in float64."""

import pytest
import torch

from megakernel.attention import build
from megakernel.ops.feature_maps import features
from megakernel.ops.kernel_attention import kernel_attention
from tests.oracles import KEPT, arrays, assert_equal, heads, joined

RNN_EPS, PERFORMER_EPS = 1e-6, 1e-4
"""Added by idiap to a denominator, and by lucidrains and EVA's repository to a feature."""


def layer(preset: str, *, kv_heads: int = 2, **compression):
    config = {"preset": preset, "compression": {"rank": 24, **compression}}
    return build(
        config, num_heads=2, num_kv_heads=kv_heads, head_dim=16, causal=False, max_positions=96
    ).double()


def linformer(case: str, x, *, share_kv: bool = False, kv_heads: int = 2):
    module = layer("linformer", kv_heads=kv_heads, share_kv=share_kv, compress="projected")
    pools = ["proj_k"] if share_kv else ["proj_k", "proj_v"]
    learned = arrays("linformer_lucidrains", *(f"{case}.w.{name}" for name in pools))
    module.compressor.matrices.data = torch.stack([matrix.T for matrix in learned])
    names = ["to_q", "to_k"] if share_kv else ["to_q", "to_k", "to_v"]
    weights = arrays("linformer_lucidrains", *(f"{case}.w.{name}.weight" for name in names))
    q, k, *v = (heads(x @ w.T, 2 if i == 0 else kv_heads) for i, w in enumerate(weights))
    # With one projection for both, the values are the keys.
    out = joined(module(q, k, v[0] if v else k))
    weight, bias = arrays("linformer_lucidrains", f"{case}.w.to_out.weight", f"{case}.w.to_out.bias")
    return out @ weight.T + bias


@pytest.mark.parametrize(("case", "options"), [("a", {}), ("b", {"share_kv": True}), ("c", {"kv_heads": 1})])
@pytest.mark.usefixtures("each_backend")
def test_linformer_equals_lucidrains(case, options):
    x, out = arrays("linformer_lucidrains", "x", f"{case}.out")
    assert_equal(linformer(case, x, **options), out)


def test_a_short_sequence_uses_the_first_columns():
    x, out = arrays("linformer_lucidrains", "x", "short.out")
    assert_equal(linformer("a", x[:, :70]), out)


def flurka(preset: str):
    """The module with the published E and F, and q, k, v of eq. 2."""
    module = layer(preset)
    module.compressor.matrices.data = torch.stack(list(arrays("flurka_composed", "E1", "E2")))
    x, w_q, w_k, w_v = arrays("flurka_composed", "x", "Wq", "Wk", "Wv")
    keys, values = module.compress(x.transpose(0, 1), first=0, length=96).transpose(1, 2)
    return module, heads(x @ w_q), heads(keys @ w_k), heads(values @ w_v)


def test_compressing_the_input_gives_the_keys_and_values_of_equation_2():
    _, *found = flurka("flurka_rnn")
    for actual, expected in zip(found, arrays("flurka_composed", "q", "k", "v")):
        assert_equal(actual, expected)


def test_flurka_rnn_equals_the_composition_of_published_parts():
    module, q, k, v = flurka("flurka_rnn")
    (out,) = arrays("flurka_composed", "out_rnn")
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    sums = kernel_attention(q, k, values, feature_map="elu", causal=False, normalize=False)
    assert_equal(sums[..., :-1] / (sums[..., -1:] + RNN_EPS), out)
    # Megakernel adds no eps; denominators are sums of 24 positive kernels.
    assert_equal(module(q, k, v), out, relative=10 * RNN_EPS)


def test_flurka_performer_equals_the_composition_of_published_parts():
    module, q, k, v = flurka("flurka_performer")
    projection, out = arrays("flurka_composed", "projection", "out_performer")
    module.projection = _FixedProjection(module.projection, projection)

    eps = projection.shape[0] ** -0.5 * PERFORMER_EPS
    published_features = (stabilized(x, projection, over_tokens=x is k) + eps for x in (q, k))
    assert_equal(kernel_attention(*published_features, v, feature_map="identity", causal=False), out)
    # The module adds no eps, which would not be small: features of long keys are far smaller than 1.
    own = kernel_attention(q, k, v, feature_map="favor", projection=projection, causal=False)
    assert_equal(module(q, k, v), own)


def stabilized(x, omega, over_tokens):
    """The published features, scaled by the largest exponent of a query, or of all keys."""
    unscaled = features("favor", x[:, :, None], omega)
    largest = unscaled.log_scale[:, :, 0] + x.square().sum(-1) * x.shape[-1] ** -0.5 / 2
    stabilizer = largest.amax(-1, keepdim=True) if over_tokens else largest
    return unscaled.values[:, :, 0] * torch.exp(unscaled.log_scale[:, :, 0] - stabilizer)[..., None]


class _FixedProjection(torch.nn.Module):
    """A projection with the oracle's matrix for all heads."""

    def __init__(self, own, matrix):
        super().__init__()
        self.feature_map, self.matrix = own.feature_map, matrix

    def forward(self):
        return self.matrix


def test_kernel_attention_over_the_eva_repositorys_features_equals_its_performer():
    x, mask, omega, out, masked = arrays("performer_evarepo", "x", "mask", "w.eval_proj", "out", "out_masked")
    qkv, bias, proj, proj_bias = arrays(
        "performer_evarepo", "w.qkv.weight", "w.qkv.bias", "w.proj.weight", "w.proj.bias"
    )
    q, k, v = (heads(part) for part in (x @ qkv.T + bias).chunk(3, -1))

    phi_q, phi_k = (stabilized(x, omega, over_tokens=x is k) + PERFORMER_EPS for x in (q, k))
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    for key_weights, expected in ((None, out), (mask[:, None], masked)):
        options = {"feature_map": "identity", "causal": False, "normalize": False, "key_weights": key_weights}
        sums = kernel_attention(phi_q, phi_k, values, **options)
        found = sums[..., :-1] / sums[..., -1:].clamp(min=1e-2)
        real = (mask.bool() if key_weights is not None else torch.ones_like(mask).bool())[:, KEPT]
        assert_equal((joined(found) @ proj.T + proj_bias)[:, KEPT][real], expected[real])
