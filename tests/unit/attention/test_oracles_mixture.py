"""Mixtures of keys against outputs of the published code of Transformer-MGK."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.attention import AttentionInputs, build
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.weighted_attention import weighted_attention
from megakernel.ops.weighted_attention.weights import WeightOptions, component_logs
from tests.oracles import KEPT, arrays, assert_equal, heads, joined

LM_EPS = 1e-6
"""Added to a row sum by the published language model; megakernel adds nothing."""


def lra_layer(mixture: dict | None = None, priors: Tensor | None = None):
    options = {"preset": "mgk", "mixture": mixture or {}}
    module = build(options, num_heads=2, head_dim=16, causal=False).double()
    if priors is not None:
        module.mixture.weights.data = priors.expand(2, 2).clone()
    return module


def lra(*keys: str):
    q, k1, k2, v, mask = arrays("mgk_lra", "q", "k1", "k2", "v", "mask")
    return (q, torch.stack([k1, k2], 2), v), mask.bool(), arrays("mgk_lra", *keys)


def assert_equal_where_real(actual: Tensor, expected: Tensor, real: Tensor) -> None:
    """Compare real queries only: at padded ones megakernel gives 0, the published code does not."""
    actual, real = actual[:, :, KEPT], real[:, KEPT]
    assert_equal(*(x.transpose(1, 2)[real] for x in (actual, expected)))


def test_mgk_equals_the_published_code():
    tensors, mask, (pi, out, masked) = lra("pi", "out", "out_masked")
    module = lra_layer(priors=pi)
    assert_equal(module(*tensors), out)
    assert_equal_where_real(module(*tensors, AttentionInputs(padding_mask=mask)), masked, mask)


def test_priors_outside_their_range_are_clamped():
    tensors, _, (pi, out) = lra("pi_out_of_range", "out_pi_clamped")
    assert_equal(lra_layer(priors=pi)(*tensors), out)


def test_hard_mgk_equals_the_published_code():
    tensors, mask, (out, masked) = lra("hard_out", "hard_out_masked")
    module = lra_layer({"estep": "hard"})
    assert_equal(module(*tensors), out)
    assert_equal_where_real(module(*tensors, AttentionInputs(padding_mask=mask)), masked, mask)


def test_priors_per_position_equal_the_published_code():
    # The published code has a prior per head and position; a layer here has one per head, and its op takes either.
    (q, k, v), mask, (pi, out, masked, trained) = lra(
        "pi_HL", "soft_out", "soft_out_masked", "soft_train_out"
    )
    priors = torch.stack([pi, 1 - pi], 1)
    assert_equal(weighted_attention(q, k, v, key_weights=priors, causal=False)[0], out)
    assert_equal(out, trained)  # the published update comes after the output
    real = priors * mask[:, None, None]
    assert_equal(weighted_attention(q, k, v, key_weights=real, causal=False)[0], masked)


@pytest.mark.parametrize("masked", [False, True])
def test_the_m_step_equals_the_published_code(masked):
    (q, k, _), mask, (pi, new, new_masked) = lra("pi_HL", "soft_train_pi_new", "soft_train_pi_new_masked")
    mask = mask if masked else torch.ones_like(mask)
    priors = torch.stack([pi, 1 - pi], 1)
    options = WeightOptions("gaussian", (1.0, 1.0), "sum", True)
    weights = component_logs(options, q, k, priors.expand(2, -1, -1, -1)).exp()
    # The published code adds 1e-6 to the weight of a mixture and to the number of pairs of a position.
    pairs = (mask[:, :, None] & mask[:, None]).double()
    responsibilities = weights[..., 0, :] / (weights.sum(-2) + 1e-6) * pairs[:, None]
    assert_equal(responsibilities.sum((0, 2)) / (pairs.sum((0, 1)) + 1e-6), new_masked if masked else new)


def lm(case: str, *keys: str) -> list[Tensor]:
    return arrays("mgk_lm", *(f"{case}.{key}" for key in keys))


def lm_tensors(case: str):
    """q, k (B, H, 2, N, d), v and x."""
    x, q_net, kv_net = *arrays("mgk_lm", "x"), *lm(case, "w.q_net.weight", "w.kv_net.weight")
    parts = [heads(part) for part in (x @ kv_net.T).split(32, -1)]
    if len(parts) == 3:
        keys = torch.stack(parts[:2], 2)
    else:
        (shift,) = lm(case, "w.mu")
        # (2, H, d): the published code subtracts its shifts.
        keys = parts[0][:, :, None] - shift.transpose(0, 1)[:, :, None]
    return heads(x @ q_net.T), keys, parts[-1], x


def lm_output(case: str, x: Tensor, attended: Tensor) -> Tensor:
    o_net, weight, bias = lm(case, "w.o_net.weight", "w.layer_norm.weight", "w.layer_norm.bias")
    return F.layer_norm(x + joined(attended) @ o_net.T, (32,), weight, bias)


def with_eps(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    values = F.pad(v, (0, 1), value=1.0)
    sums = weighted_attention(q, k, values, normalize=False, **options)[0]
    return sums[..., :-1] / (sums[..., -1:] + LM_EPS)


@pytest.mark.parametrize("case", ["rbf2keys", "rbf", "soft2keys", "soft", "hard2keys", "hard"])
@pytest.mark.parametrize("causal", [True, False])
def test_language_model_mgk_equals_the_published_code(case, causal):
    q, k, v, x = lm_tensors(case)
    # The published second component weighs exp(-1.5 |q - k|^2 / sqrt(d)).
    options: dict = {"causal": causal, "variances": (1.0, 1 / 3)}
    (expected,) = lm(case, "out" if causal else "out_nomask")
    if case.startswith("hard"):
        attended, _ = weighted_attention(q, k, v, join="max", **options)
        assert_equal(lm_output(case, x, attended), expected)
        return
    if case.startswith("rbf"):
        pi = torch.stack(lm(case, "w.pi0", "w.pi1"), 1)
        options |= {"key_weights": pi[:, :, 0, 0, :96].clamp(0, 1)}
    else:
        (pi,) = lm(case, "w.pi")
        options |= {"key_weights": torch.stack([pi, 1 - pi], 1)[:, :, 0, 0, :96]}
    assert_equal(lm_output(case, x, with_eps(q, k, v, **options)), expected)


@pytest.mark.parametrize("case", ["rbf2keys", "rbf"])
def test_mlk_equals_the_published_code(case):
    x, qkv_net, out = *arrays("mlk_lm", "x"), *arrays("mlk_lm", f"{case}.w.qkv_net.weight", f"{case}.out")
    pi = torch.stack(arrays("mlk_lm", f"{case}.w.pi0", f"{case}.w.pi1"), 1)[:, :, :96].clamp(0, 1)
    q, *keys, v = heads(x @ qkv_net.T).split(16, -1)
    k = torch.stack(keys, 2)
    if case == "rbf":
        (shift,) = arrays("mlk_lm", "rbf.w.mu")
        k = k - shift.transpose(0, 1)[:, :, None]

    def phi(y: Tensor) -> Tensor:
        features = F.elu(y) + 1
        return features / features.sum(-1, keepdim=True)

    # The published priors are per position and its features sum to 1: both are multiplied into the features here.
    sums = kernel_attention(
        phi(q),
        phi(k) * pi[..., None],
        F.pad(v, (0, 1), value=1.0),
        priors=torch.ones(2, 2).double(),
        feature_map="identity",
        normalize=False,
    )
    attended = 16**-0.5 * sums[..., :-1] / (sums[..., -1:] + 1e-5)
    o_net, weight, bias = arrays(
        "mlk_lm", *(f"{case}.w.{name}" for name in ("o_net.weight", "layer_norm.weight", "layer_norm.bias"))
    )
    assert_equal(F.layer_norm(x + joined(attended) @ o_net.T, (32,), weight, bias), out)


def test_kernelized_attention_equals_the_code_of_skyformer():
    q, k, v, mask, out, masked = arrays("kernelized_gaussian", "q", "k", "v", "mask", "out", "out_masked")
    module = build("kernelized", num_heads=2, head_dim=16, causal=False)
    assert_equal(module(q, k, v), out)
    # The published code zeroes padded queries and lets them attend; megakernel gives 0 there.
    real = mask.bool()
    assert_equal_where_real(module(q, k, v, AttentionInputs(padding_mask=real)), masked, real)
    zeroed = q * mask[:, None, :, None]
    assert_equal(
        weighted_attention(zeroed, k, v, key_weights=mask[:, None, None], normalize=False, causal=False)[0],
        masked,
    )


def test_softmax_equals_the_code_of_skyformer():
    q, k, v, mask = arrays("kernelized_gaussian", "q", "k", "v", "mask")
    out, masked = arrays("kernelized_gaussian", "softmax_out", "softmax_out_masked")
    assert_equal(softmax_attention(q, k, v, causal=False)[0], out)
    assert_equal(softmax_attention(q, k, v, causal=False, key_mask=mask.bool())[0], masked)
