"""Float8 products: what is rounded, where they are, and what they leave alone."""

import pytest
import torch
import torch.nn.functional as F

from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings
from megakernel.model.float8 import ATTRIBUTE, Float8, check_float8, use_float8
from megakernel.model.layer import layer_matrices
from tests.unit.config.trees import problems

ROUNDING = 2.0**-4
"""Of a number in e4m3, whose significand has 4 bits: at most half of the distance to its neighbor, relatively."""

SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "attention": "softmax"}


def rounded(x, dim, dtype=torch.float8_e4m3fn):
    """x as float8 numbers over their scale, in float64. dim: along which a row is scaled; None: the whole tensor."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.float()
    scale = scale if dim is None else 2 ** scale.log2().floor()  # rows have powers of 2
    return (x.float() * scale).to(dtype).double() / scale.double()


def drawn(*shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-1, 1, shape[0])[:, None]).bfloat16()


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_product_is_that_of_rounded_numbers_and_so_are_those_of_its_gradient(scaling):
    x, weight, grad = drawn(48, 64), drawn(32, 64, seed=1), drawn(48, 32, seed=2)
    x.requires_grad_()
    weight.requires_grad_()
    out = Float8.of(scaling)(x, weight)
    out.backward(grad)
    rows, columns = (1, 0) if scaling == "rowwise" else (None, None)
    x_, w_ = x.detach(), weight.detach()
    # The output's gradient has a wide range: with one scale, exponents have a bit more.
    wide = torch.float8_e4m3fn if scaling == "rowwise" else torch.float8_e5m2
    expected = {
        "out": rounded(x_, rows) @ rounded(w_, rows).T,
        "dx": rounded(grad, rows, wide) @ rounded(w_, columns),
        "dweight": rounded(grad, columns, wide).T @ rounded(x_, columns),
    }
    for name, found in {"out": out, "dx": x.grad, "dweight": weight.grad}.items():
        error = (found.double() - expected[name]).norm() / expected[name].norm()
        assert error < 0.003, (name, error.item())  # the result's rounding to bfloat16
    exact = F.linear(x.detach().double(), weight.detach().double())
    assert 0.005 < (out.double() - exact).norm() / exact.norm() < ROUNDING


def build(mesh, scaling=None, compiles=False, **parts):
    model = Model.model_validate(SIZES | parts)
    model = LanguageModel(
        ModelSettings(model, 40, mesh, isolate_documents=False, compile=compiles)
    ).bfloat16()
    if scaling is not None:
        use_float8(layer_matrices(model), scaling)
    return model


def inputs():
    tokens = torch.randint(40, (2, 32), generator=torch.Generator().manual_seed(0))
    return tokens, torch.arange(32).repeat(2, 1), tokens, torch.tensor([64])


def test_every_matrix_of_a_layer_is_multiplied_in_float8_in_training_and_none_in_evaluation(mesh):
    model, plain = build(mesh, "rowwise"), build(mesh)
    expected = plain.eval()(*inputs())
    assert torch.equal(model.eval()(*inputs()), expected)
    calls = []
    for linear in layer_matrices(model):
        used = getattr(linear, ATTRIBUTE)
        setattr(linear, ATTRIBUTE, lambda x, weight, used=used: calls.append(weight) or used(x, weight))
    loss = model.train()(*inputs())
    matrices = [linear.weight for linear in layer_matrices(model)]
    assert [id(weight) for weight in calls] == [id(weight) for weight in matrices]
    assert len(matrices) == 2 * 4
    assert loss != expected
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    loss.backward()
    assert all(weight.grad.abs().max() > 0 for weight in matrices)


def test_cross_attention_is_multiplied_in_float8_too(mesh):
    parts = {"kind": "encoder_decoder", "encoder": {"num_layers": 1}, "num_layers": 1}
    model = build(mesh, "tensorwise", **parts)
    marked = [name for name, module in model.named_modules() if hasattr(module, ATTRIBUTE)]
    assert [name for name in marked if "cross_attention" in name] == [
        f"3.cross_attention.{matrix}" for matrix in ("query", "key_value", "output")
    ]
    assert len(marked) == 4 + 4 + 3


@pytest.mark.second
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_a_compiled_layer_has_float8_products_in_its_graph(mesh, scaling):
    results = []
    for compiles in (False, True):
        model = build(mesh, scaling, compiles).train()
        loss = model(*inputs())
        loss.backward()
        results.append([loss.item(), *(p.grad.float().norm().item() for p in model.parameters())])
    assert results[0] == pytest.approx(results[1], rel=0.05)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"training": {"dtype": "float32"}}, "training.fp8"),
        ({"parallel": {"zero_stage": 3}}, "parallel.zero_stage"),
        ({"model": {"hidden_size": 72, "num_heads": 2, "head_dim": 64}}, "training.fp8"),
        ({"model": {"ffn_hidden_size": 344}}, "training.fp8"),
        ({"model": {"ffn_hidden_size": 352}, "parallel": {"tensor": 4}}, "training.fp8"),
        ({"model": {"head_dim": 8, "num_heads": 2, "num_kv_heads": 1, "attention": "mlk"}}, "training.fp8"),
        ({"training": {"seq_len": 30}}, "training.fp8"),
        ({"training": {"seq_len_schedule": [{"until_step": 10, "seq_len": 40}]}}, "training.fp8"),
        ({"training": {"mlp_chunk_size": 200}}, "training.fp8"),
    ],
)
def test_what_has_no_float8_products_is_refused(sections, key):
    training = {"fp8": "tensorwise", **sections.get("training", {})}
    assert key in problems(**{**sections, "training": training})
    assert not problems(training={"fp8": "tensorwise"})


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UserError, match=r"needs a GPU of compute capability 8\.9 or more, and A100 has 8\.0"):
        check_float8("rowwise", torch.device("cuda"))
