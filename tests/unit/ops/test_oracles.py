"""Ops agree with arrays computed by other implementations, in float64."""

import pytest
import torch
from torch import Tensor

from megakernel.ops.feature_maps import features
from megakernel.ops.kernel_attention import kernel_attention
from tests.oracles import FOLDER, arrays, assert_equal

EPS = 1e-6
"""The number that the idiap and Google implementations add to a denominator or to a feature."""


def with_eps(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Kernel attention with EPS added to the denominator, as in idiap's; ours adds none."""
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    sums = kernel_attention(q, k, values, normalize=False, **options)
    return sums[..., :-1] / (sums[..., -1:] + EPS)


def key_mass(lengths: Tensor, count: int) -> Tensor:
    return (torch.arange(count) < lengths[:, None])[:, None].double()


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_linear_attention_equals_idiap(backend):
    q, k, v, lengths, out, masked = arrays("linear_elu", "q", "k", "v", "lengths", "out", "out_masked")
    options = {"feature_map": "elu", "causal": False, "backend": backend}
    assert_equal(with_eps(q, k, v, **options), out)
    assert_equal(with_eps(q, k, v, key_weights=key_mass(lengths, 96), **options), masked)
    # Denominators are above 1, so eps changes them by a millionth at most.
    assert_equal(kernel_attention(q, k, v, **options), out, relative=EPS)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_causal_linear_attention_equals_idiap(backend):
    q, k, v, lengths = arrays("linear_elu", "q", "k", "v", "lengths")
    out, masked = arrays("linear_elu", "causal_out_f32", "causal_out_masked_f32")
    options = {"feature_map": "elu", "backend": backend}
    # The official kernel ran in float32.
    assert_equal(with_eps(q, k, v, **options), out, relative=1e-5)
    assert_equal(with_eps(q, k, v, key_weights=key_mass(lengths, 96), **options), masked, relative=1e-5)


def test_favor_features_equal_google():
    q, k, omega, phi_q, phi_k = arrays("performer_google", "q", "k", "projection", "phi_q", "phi_k")
    for x, expected, over_tokens in ((q, phi_q, False), (k, phi_k, True)):
        ours = features("favor", x[:, :, None], omega)
        # Google's stabilizer is the maximum of omega.x, for keys over the whole sequence; it also adds eps to features.
        largest = ours.log_scale[:, :, 0] + x.square().sum(-1) * x.shape[-1] ** -0.5 / 2
        stabilizer = largest.amax(-1, keepdim=True) if over_tokens else largest
        scale = torch.exp(ours.log_scale[:, :, 0] - stabilizer)
        assert_equal(ours.values[:, :, 0] * scale[..., None] + omega.shape[0] ** -0.5 * EPS, expected)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_attention_over_googles_features_equals_google(backend):
    phi_q, phi_k, v = arrays("performer_google", "phi_q", "phi_k", "v")
    out, causal_out = arrays("performer_google", "out", "causal_out")
    options = {"feature_map": "identity", "backend": backend, "normalize": False}
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    for expected, causal in ((out, False), (causal_out, True)):
        sums = kernel_attention(phi_q, phi_k, values, causal=causal, **options)
        denominator = sums[..., -1:]
        # Google's adds twice eps to denominators that are not above eps.
        assert_equal(sums[..., :-1] / (denominator + 2 * EPS * (denominator <= EPS)), expected)


def test_attention_over_smoothed_fourier_features_equals_idiap():
    phi_q, phi_k, v, lengths = arrays("rff_idiap", "phi_q", "phi_k", "v", "lengths")
    out, masked = arrays("rff_idiap", "smooth_out", "smooth_out_masked")
    phi_q, phi_k = (torch.cat([phi, torch.ones_like(phi[..., :1])], -1) for phi in (phi_q, phi_k))
    options = {"feature_map": "identity", "causal": False}
    assert_equal(with_eps(phi_q, phi_k, v, **options), out)
    assert_equal(with_eps(phi_q, phi_k, v, key_weights=key_mass(lengths, 96), **options), masked)


def test_every_oracle_has_its_origin_and_all_are_small():
    files = sorted(FOLDER.glob("*.npz"))
    page = (FOLDER / "README.md").read_text()
    assert [path.name for path in files if f"`{path.stem}`" not in page] == []
    assert sum(path.stat().st_size for path in files) < 4_000_000
