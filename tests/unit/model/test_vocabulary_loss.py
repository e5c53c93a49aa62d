"""The loss that computes its gradients in the forward, against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.model.layer_inputs import IGNORED
from megakernel.model.vocabulary_loss import (
    DistillationTarget,
    LogitScaling,
    summed_loss,
)
from megakernel.ops import dispatch
from megakernel.parallel import OneProcess

TOKENS, WIDTH, VOCAB_SIZE = 23, 16, 40
PADDED_VOCAB_SIZE = 64
"""Rows of the output heads."""

OBJECTIVES = {
    "labels": None,
    "both": {"temperature": 1.0, "divergence": 1.0, "cross_entropy": 0.5},
    "both, heated": {"temperature": 2.0, "divergence": 0.7, "cross_entropy": 0.3},
    "teacher alone": {"temperature": 2.0, "divergence": 0.7, "cross_entropy": 0.0},
}
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""bfloat16: the gradient of a logit is rounded before the matrix products, as in autograd."""


def random_inputs(dtype):
    """Hidden states and heads of a model and of a narrower teacher, and labels of which some are ignored."""
    torch.manual_seed(0)
    shapes = (TOKENS, WIDTH), (PADDED_VOCAB_SIZE, WIDTH), (TOKENS, 12), (PADDED_VOCAB_SIZE, 12)
    targets = torch.randint(VOCAB_SIZE, (TOKENS,))
    targets[3:5] = IGNORED
    return [torch.randn(shape).to(dtype) for shape in shapes], targets


SCALINGS = (LogitScaling(), LogitScaling(divisor=3.0), LogitScaling(divisor=0.5, cap=2.0))


def expected(tensors, targets, weights, scaling=SCALINGS[0], teacher_scaling=SCALINGS[0]):
    """The loss and its parts from full logits without padded ids."""
    hidden, head, teacher_hidden, teacher_head = tensors
    head, teacher_head = head[:VOCAB_SIZE], teacher_head[:VOCAB_SIZE]
    logits = scaled(hidden @ head.T, scaling)[targets != IGNORED]
    cross_entropy = F.cross_entropy(logits, targets[targets != IGNORED], reduction="sum")
    if weights is None:
        return cross_entropy, ()
    temperature = weights["temperature"]
    teacher_logits = scaled(teacher_hidden @ teacher_head.T, teacher_scaling)[targets != IGNORED]
    teacher = F.log_softmax(teacher_logits / temperature, -1)
    divergence = F.kl_div(F.log_softmax(logits / temperature, -1), teacher, reduction="sum", log_target=True)
    loss = weights["cross_entropy"] * cross_entropy + weights["divergence"] * temperature**2 * divergence
    return loss, (cross_entropy.item(), divergence.item())


def scaled(products, scaling):
    logits = products / scaling.divisor
    return logits if scaling.cap is None else scaling.cap * torch.tanh(logits / scaling.cap)


def expected_z_loss(hidden, head, targets, coefficient, scaling=SCALINGS[0]):
    """coefficient x the sum of logsumexp(logits)^2 over the tokens that count, without padded ids."""
    logits = scaled(hidden @ head[:VOCAB_SIZE].T, scaling)[targets != IGNORED]
    return coefficient * logits.logsumexp(-1).square().sum()


def compute_loss(
    hidden,
    head,
    targets,
    rows,
    distillation=None,
    vocab_size=VOCAB_SIZE,
    group=None,
    scaling=SCALINGS[0],
    z_loss=0.0,
):
    return summed_loss(hidden, head, targets, rows, vocab_size, group, scaling, distillation, z_loss)


@pytest.mark.parametrize("rows", [TOKENS, 8], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("weights", OBJECTIVES.values(), ids=OBJECTIVES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_loss_and_gradients_equal_those_of_full_logits(dtype, weights, rows):
    tensors, targets = random_inputs(dtype)
    in_float64 = [x.double().requires_grad_(index < 2) for index, x in enumerate(tensors)]
    expected_loss, parts = expected(in_float64, targets, weights)
    expected_gradients = torch.autograd.grad(3 * expected_loss, in_float64[:2])

    hidden, head, teacher_hidden, teacher_head = (
        x.requires_grad_(index < 2) for index, x in enumerate(tensors)
    )
    distillation = None if weights is None else DistillationTarget(teacher_hidden, teacher_head, **weights)
    loss, sums = compute_loss(hidden, head, targets, rows, distillation)
    gradients = torch.autograd.grad(3 * loss, (hidden, head))

    bound = BOUNDS[dtype]
    assert loss.item() == pytest.approx(expected_loss.item(), rel=bound)
    if distillation is not None:
        assert sums.tolist() == pytest.approx(parts, rel=bound)
        assert not sums.requires_grad
    for actual, exact in zip(gradients, expected_gradients, strict=True):
        assert actual.dtype == dtype
        assert (actual - exact).norm() <= bound * exact.norm()
    assert not gradients[1][VOCAB_SIZE:].any()


@pytest.mark.parametrize(
    "weights", [OBJECTIVES["labels"], OBJECTIVES["both, heated"]], ids=["labels", "both"]
)
@pytest.mark.parametrize("scaling", SCALINGS[1:], ids=["divided", "capped"])
def test_gradients_through_divided_and_capped_logits_are_exact(scaling, weights):
    tensors, targets = random_inputs(torch.float64)
    learned = [x.requires_grad_() for x in tensors[:2]]
    teacher_scaling = LogitScaling(cap=1.5)
    expected_loss, _ = expected(tensors, targets, weights, scaling, teacher_scaling)
    expected_gradients = torch.autograd.grad(expected_loss, learned)
    distillation = None
    if weights is not None:
        distillation = DistillationTarget(*tensors[2:], **weights, scaling=teacher_scaling)
    loss, _ = compute_loss(*learned, targets, 8, distillation, scaling=scaling)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-14)
    for actual, exact in zip(torch.autograd.grad(loss, learned), expected_gradients, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["chunked", "reference"])
@pytest.mark.parametrize("rows", [TOKENS, 8], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_z_loss_is_in_the_gradients_and_not_in_the_loss(dtype, rows, backend, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, backend)
    (hidden, head, *_), targets = random_inputs(dtype)
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    cross_entropy, z_loss = (
        expected([*exact, *random_inputs(dtype)[0][2:]], targets, None)[0],
        expected_z_loss(*exact, targets, 0.25),
    )
    expected_gradients = torch.autograd.grad(3 * (cross_entropy + z_loss), exact)

    learned = hidden.requires_grad_(), head.requires_grad_()
    loss, sums = compute_loss(*learned, targets, rows, z_loss=0.25)
    plain, sums_without = compute_loss(*learned, targets, rows)
    bound = BOUNDS[dtype]
    assert loss.item() == plain.item() == sums[0].item()
    assert sums[1].item() == pytest.approx(z_loss.item(), rel=bound)
    assert sums_without[1].item() == 0
    for actual, right in zip(torch.autograd.grad(3 * loss, learned), expected_gradients, strict=True):
        assert (actual - right).norm() <= bound * right.norm()
    with torch.no_grad():
        assert compute_loss(*learned, targets, rows, z_loss=0.25)[0].item() == loss.item()


@pytest.mark.parametrize("scaling", SCALINGS[1:], ids=["divided", "capped"])
def test_the_z_loss_is_of_the_scaled_logits(scaling):
    (hidden, head, *_), targets = random_inputs(torch.float64)
    learned = hidden.requires_grad_(), head.requires_grad_()
    logits = scaled(hidden @ head[:VOCAB_SIZE].T, scaling)
    cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    z_loss = expected_z_loss(*learned, targets, 2.0, scaling)
    expected_gradients = torch.autograd.grad(cross_entropy + z_loss, learned)
    loss, sums = compute_loss(*learned, targets, 8, scaling=scaling, z_loss=2.0)
    assert sums.tolist() == pytest.approx([cross_entropy.item(), z_loss.item()], rel=1e-14)
    for actual, right in zip(torch.autograd.grad(loss, learned), expected_gradients, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-12, atol=1e-13)


def test_the_loss_and_gradient_of_a_model_equal_to_its_teacher_are_zero():
    (hidden, head, *_), targets = random_inputs(torch.float32)
    hidden.requires_grad_()
    distillation = DistillationTarget(
        hidden.detach(), head, temperature=3.0, divergence=1.0, cross_entropy=0.0
    )
    loss, _ = compute_loss(hidden, head, targets, 8, distillation)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-5)
    assert hidden.grad.abs().max() <= 1e-6


@pytest.mark.parametrize("learned", ["states", "head"])
def test_frozen_weights_get_no_gradient(learned):
    (hidden, head, *_), targets = random_inputs(torch.float32)
    (hidden if learned == "states" else head).requires_grad_()
    summed_loss(hidden, head, targets, 8, VOCAB_SIZE)[0].backward()
    assert (hidden.grad is None, head.grad is None) == (learned == "head", learned == "states")


def test_without_tokens_loss_and_gradient_are_zero():
    (_, head, *_), targets = random_inputs(torch.float32)
    head.requires_grad_()
    loss, _ = summed_loss(torch.empty(0, WIDTH, requires_grad=True), head, targets[:0], 8, PADDED_VOCAB_SIZE)
    loss.backward()
    assert loss.item() == 0.0
    assert head.grad.shape == head.shape
    assert not head.grad.any()


@pytest.mark.parametrize("tied", [True, False])
def test_padding_the_vocabulary_does_not_change_a_new_model(tied):
    tokens = torch.randint(VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(1))
    layer_inputs = tokens, torch.arange(9).expand(2, -1), tokens.roll(-1, 1), torch.tensor([18])
    losses, logits, expected_gradients = [], [], []
    for multiple in (1, 64):
        config = Model(
            num_layers=1,
            hidden_size=16,
            num_heads=2,
            vocab_multiple=multiple,
            tie_embeddings=tied,
            init_std=0.5,
        )
        model = LanguageModel(ModelSettings(config, VOCAB_SIZE, OneProcess()))
        losses.append(loss := model(*layer_inputs))
        logits.append(model.logits(model.hidden(*layer_inputs[:2])))
        expected_gradients.append(
            torch.autograd.grad(loss, [model.token_embedding.tokens.weight, model.output_matrix])
        )
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*logits)
    for plain, padded in zip(*expected_gradients, strict=True):
        torch.testing.assert_close(padded, F.pad(plain, (0, 0, 0, 64 - VOCAB_SIZE)))
