"""Muon against singular value decompositions and PyTorch's own."""

import pytest
import torch
from torch import nn

from megakernel.checkpoint.whole_tensors import MUON
from megakernel.config import Model, Optimizer
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel.axis import OneProcess
from megakernel.training.muon import Matrices, Muon, orthogonalized, whole_matrices
from megakernel.training.optimizer import LR_SCALE, WHOLE_MATRICES, parameter_groups


def polynomial(values):
    """What five steps of Newton-Schulz make of singular values."""
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 7)])
def test_orthogonalizing_keeps_the_singular_vectors_and_evens_the_values(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    values = polynomial(s / s.norm())
    found = orthogonalized(1e-6 * matrix, torch.float64)
    torch.testing.assert_close(found, u @ torch.diag(values) @ v, rtol=1e-5, atol=1e-8)
    if min(shape) < max(shape):  # a square one has singular values near 0
        assert 0.6 < values.min() <= values.max() < 1.3


def test_a_gradient_of_zeros_updates_nothing():
    assert not orthogonalized(torch.zeros(3, 5), torch.float32).any()


def muon_of(weight, **settings) -> Muon:
    group = {"params": [weight], "weight_decay": 0.1, MUON: True}
    return Muon([group], matrices=Matrices([weight], OneProcess(), torch.float32), momentum=0.9, **settings)


def test_updates_are_those_of_pytorch():
    """PyTorch orthogonalizes in bfloat16: 2 % of an update."""
    start = torch.randn(24, 40)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    expected = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = muon_of(ours, lr=1e-2)
    for _ in range(4):
        before = theirs.detach().clone()
        gradient = torch.randn(24, 40)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        expected.step()
        assert torch.equal(ours.grad, gradient)
        assert (ours - theirs).norm() <= 0.02 * (theirs - before).norm()
        ours.data.copy_(theirs.data)
    assert optimizer.state[ours]["step"] == 4


@pytest.fixture
def model():
    section = Model(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        bias=True,
        tie_embeddings=False,
        attention={"preset": "gated_deltanet", "output_gate": "silu", "short_convolution": 3},
        attention_pattern=["main", "flurka"],
    )
    return LanguageModel(ModelSettings(section, vocab_size=64, mesh=OneProcess()))


def test_muon_trains_the_projections_of_the_blocks_and_adamw_the_rest(model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = Optimizer(name="muon", lr=1e-3, muon_lr=4e-3, weight_decay=0.1)
    groups = {
        key: {names[id(p)] for p in group["params"]}
        for key, group in parameter_groups(model, settings).items()
    }
    layer = {"self_attention.qkv", "self_attention.output", "mlp.linear_fc1", "mlp.linear_fc2"}
    whole = {f"{index}.{name}.weight" for index in (1, 2) for name in layer}
    assert groups[WHOLE_MATRICES] == whole | {"1.self_attention.output_gate.weight"}
    assert {"0.tokens.weight", "4.linear.weight"} <= groups["matrices"]
    assert set().union(*groups.values()) == set(names.values())
    assert sum(map(len, groups.values())) == len(names)
    muon = parameter_groups(model, settings)[WHOLE_MATRICES]
    assert (muon["weight_decay"], muon[LR_SCALE]) == (0.1, pytest.approx(4.0))


def test_matrices_that_share_a_weight_are_orthogonalized_one_by_one(model):
    matrices = Matrices(whole_matrices(model), OneProcess(), torch.float32)
    attention, mlp = model.layers[2].self_attention, model.layers[2].mlp

    def scaled(matrix):
        return 0.2 * max(matrix.shape) ** 0.5 * orthogonalized(matrix, torch.float32)

    qkv = attention.qkv.weight
    direction = torch.randn(qkv.shape)
    # For each of two key heads: two queries, a key and a value of 8 rows.
    found = matrices.update(qkv, direction).view(2, 32, 32)
    given = direction.view(2, 32, 32)
    for rows in (slice(0, 16), slice(16, 24), slice(24, 32)):
        expected = scaled(given[:, rows].reshape(-1, 32))
        torch.testing.assert_close(found[:, rows].reshape(-1, 32), expected)

    gate_up = mlp.linear_fc1.weight
    direction = torch.randn(gate_up.shape)
    expected = torch.cat([scaled(half) for half in direction.chunk(2)])
    torch.testing.assert_close(matrices.update(gate_up, direction), expected)
    down = mlp.linear_fc2.weight
    direction = torch.randn(down.shape)
    torch.testing.assert_close(matrices.update(down, direction), scaled(direction))
