"""Liger-Kernel's norms, SwiGLU, rotation and loss against the formulas in float64."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.attention import Rotary
from megakernel.config.extras import install
from megakernel.model.vocabulary_loss import summed_loss
from megakernel.ops import dispatch, layers
from megakernel.ops.layers import liger
from megakernel.ops.tensors import accum_dtype

from .comparing import DEVICE, TOLERANCE, rms_ratio
from .completed_interpreter import complete

DTYPES = [torch.float32, torch.bfloat16]
# For kernels that add or multiply bfloat16 numbers, which the interpreter stores as integers.
HALF_ON_GPU = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Makes Triton's interpreter able to run Liger-Kernel's norms."""
    if DEVICE == "cpu":
        complete(monkeypatch)


@pytest.fixture
def by_liger(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "liger")


def normal(draw, *shape):
    return torch.randn(shape, generator=draw)


def assert_agrees(run, tensors, dtype, draw):
    """`run(liger, tensors)` and its gradients are those of `run(reference, tensors in float64)`."""
    tensors = [x.to(DEVICE, dtype) for x in tensors]
    found = [x.clone().requires_grad_() for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    outputs, expected = run("liger", *found), run("reference", *exact)
    pulls = [normal(draw, *x.shape).to(DEVICE, x.dtype) for x in outputs]
    kept = [x.clone() for x in pulls]
    slopes = torch.autograd.grad(outputs, found, pulls)
    wanted = torch.autograd.grad(expected, exact, [x.double() for x in pulls])
    for actual, right in zip((*outputs, *slopes), (*expected, *wanted), strict=True):
        assert actual.shape == right.shape
        assert rms_ratio(actual, right) <= TOLERANCE[dtype]
    for before, after in zip((*tensors, *kept), (*found, *pulls), strict=True):
        assert torch.equal(before, after)  # inputs are not overwritten


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 2, 48), (1, 1, 130), (7, 64)])
def test_rms_norm(shape, dtype, draw):
    run = lambda backend, x, weight: [layers.rms_norm(x, weight, 1e-5, backend=backend)]  # noqa: E731
    assert_agrees(run, [3 * normal(draw, *shape), 1 + normal(draw, shape[-1])], dtype, draw)


@pytest.mark.parametrize("dtype", HALF_ON_GPU)
@pytest.mark.parametrize("shape", [(5, 2, 48), (1, 1, 130), (7, 64)])
def test_rms_norm_of_a_sum(shape, dtype, draw):
    def run(backend, *tensors):
        return layers.add_rms_norm(*tensors, 1e-5, backend=backend)

    tensors = [normal(draw, *shape), 2 * normal(draw, *shape), 1 + normal(draw, shape[-1])]
    assert_agrees(run, tensors, dtype, draw)


@pytest.mark.parametrize("dtype", HALF_ON_GPU)
@pytest.mark.parametrize("shape", [(5, 2, 48), (1, 1, 130), (7, 64)])
def test_rms_norm_and_residual(shape, dtype, draw):
    def run(backend, *tensors):
        return layers.rms_norm_and_residual(*tensors, 1e-5, backend=backend)

    assert_agrees(run, [3 * normal(draw, *shape), 1 + normal(draw, shape[-1])], dtype, draw)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 2, 48), (1, 1, 130), (7, 64)])
def test_layer_norm(shape, dtype, draw):
    def run(backend, *tensors):
        return [layers.layer_norm(*tensors, 1e-5, backend=backend)]

    tensors = [2 + normal(draw, *shape), 1 + normal(draw, shape[-1]), normal(draw, shape[-1])]
    assert_agrees(run, tensors, dtype, draw)


@pytest.mark.parametrize("dtype", HALF_ON_GPU)
@pytest.mark.parametrize("shape", [(5, 2, 48), (1, 1, 130), (7, 64)])
def test_swiglu(shape, dtype, draw):
    assert_agrees(
        lambda backend, x: [layers.swiglu(x, backend=backend)], [3 * normal(draw, *shape)], dtype, draw
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [(3, 1), (4, 4)])
def test_rotation(heads, rows, dtype, draw):
    """With grouped queries, with positions per sequence, and in both memory layouts of queries."""
    places = torch.randint(0, 1_000_000, (rows, 17), generator=draw).to(DEVICE)
    rotary = Rotary(12)

    def run(backend, q, k):
        return layers.rotate(q, k, *rotary._angles(places, accum_dtype(q.dtype)), backend=backend)

    q, k = (normal(draw, 2, count, 17, 12) for count in heads)
    assert_agrees(run, [q, k], dtype, draw)
    tokens_first = normal(draw, 2, 17, heads[0], 12).transpose(1, 2)
    assert_agrees(run, [tokens_first, k], dtype, draw)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "width", "vocab_size", "padding", "rows"),
    [(37, 16, 50, 14, 4096), (37, 16, 50, 0, 8), (300, 8, 70, 3, 10), (1, 16, 50, 0, 1)],
)
def test_loss(by_liger, tokens, width, vocab_size, padding, rows, dtype, draw):
    """In one chunk, and in several; with ignored targets and padding of the vocabulary.

    Logits have the size of a new model's: the loss and the gradient of a nearly certain token are so small that the
    rounding of its logits would dominate them.
    """
    targets = torch.randint(0, vocab_size, (tokens,), generator=draw)
    targets[1::5] = -100

    def run(backend, hidden, weight):
        if backend == "liger":
            return [summed_loss(hidden, weight, targets.to(DEVICE), rows, vocab_size)[0]]
        return [F.cross_entropy(hidden @ weight[:vocab_size].T, targets.to(DEVICE), reduction="sum")]

    weight = normal(draw, vocab_size + padding, width) * width**-0.5
    assert_agrees(run, [normal(draw, tokens, width), weight], dtype, draw)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_z_loss_is_in_the_gradients_and_not_in_the_loss(by_liger, dtype, draw):
    targets = torch.randint(0, 50, (37,), generator=draw)
    targets[1::5] = -100
    counts, z_loss = targets != -100, 0.125

    hidden, weight = normal(draw, 37, 16), normal(draw, 64, 16) * 16**-0.5
    found = [x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().cpu().double().requires_grad_() for x in found]
    logits = exact[0] @ exact[1][:50].T
    right = F.cross_entropy(logits, targets, reduction="sum")
    squares = z_loss * logits.logsumexp(-1).square()[counts].sum()
    loss, sums = summed_loss(*found, targets.to(DEVICE), 8, 50, z_loss=z_loss)
    for actual, wanted in ((loss, right), (sums[0], right), (sums[1], squares)):
        assert rms_ratio(actual.cpu(), wanted) <= TOLERANCE[dtype]
    wanted = torch.autograd.grad(right + squares, exact)
    for actual, slope in zip(torch.autograd.grad(loss, found), wanted, strict=True):
        assert rms_ratio(actual.cpu(), slope) <= TOLERANCE[dtype]


@pytest.mark.parametrize("targets", [[], [-100, -100, -100]])
def test_loss_of_nothing_is_zero_and_has_gradients(by_liger, targets):
    hidden, weight = torch.randn(len(targets), 4, device=DEVICE), torch.randn(6, 4, device=DEVICE)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    wanted = torch.tensor(targets, dtype=torch.int64, device=DEVICE)
    loss, _ = summed_loss(hidden, weight, wanted, 8, 6)
    assert loss.item() == 0
    assert all(not slope.any() for slope in torch.autograd.grad(loss, [hidden, weight]))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_the_loss_has_gradients_for_what_is_not_frozen(by_liger, frozen, draw):
    hidden, weight = normal(draw, 9, 4).to(DEVICE), normal(draw, 6, 4).to(DEVICE)
    targets = torch.randint(0, 6, (9,), generator=draw).to(DEVICE)
    learned = (weight if frozen == "hidden" else hidden).requires_grad_()
    losses = (
        summed_loss(hidden, weight, targets, 4, 6)[0],
        F.cross_entropy(hidden @ weight.T, targets, reduction="sum"),
    )
    found, expected = (torch.autograd.grad(loss, learned)[0] for loss in losses)
    assert rms_ratio(found, expected) <= 1e-5
    with torch.no_grad():
        assert rms_ratio(summed_loss(hidden, weight, targets, 4, 6)[0], losses[1]) <= 1e-6


@pytest.mark.parametrize(
    ("tokens", "width", "vocab_size", "rows"),
    [(100, 4, 30, 8), (100, 4, 30, 9), (700, 8, 64, 16), (64, 8, 9, 64), (50, 9, 8, 7)],
)
def test_at_most_the_given_number_of_logit_rows_exists_at_once(by_liger, tokens, width, vocab_size, rows):
    heights = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function.overloadpacket is torch.ops.aten.mm and out.shape[1] == vocab_size:
                heights.append(len(out))
            return out

    hidden, weight = torch.randn(tokens, width, device=DEVICE), torch.randn(vocab_size, width, device=DEVICE)
    with Products(), torch.no_grad():
        summed_loss(hidden, weight, torch.zeros(tokens, dtype=torch.int64, device=DEVICE), rows, vocab_size)
    assert sum(heights) == tokens
    assert max(heights) <= rows
    assert max(heights) == min(rows, tokens)


@pytest.mark.parametrize("name", [None, "triton", "chunked", "reference"])
def test_a_cpu_uses_torch(name, monkeypatch):
    """Whether or not our own kernels are requested, and with Liger-Kernel installed."""
    monkeypatch.setattr(liger, "rms_norm", lambda *args: pytest.fail("liger-kernel ran"))
    monkeypatch.setenv(dispatch.VARIABLE, name) if name else monkeypatch.delenv(dispatch.VARIABLE, False)
    x, weight = torch.randn(3, 8), torch.ones(8)
    assert torch.equal(layers.rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))


def test_calls_that_do_not_fit_are_refused_with_the_reason(monkeypatch):
    wide = torch.randn(1, liger.WIDEST + 2, device=DEVICE)
    with pytest.raises(ValueError, match="backend='liger': tokens have width 65538; expected at most 65536"):
        layers.swiglu(wide, backend="liger")
    with pytest.raises(ValueError, match=r"tokens are torch\.float64"):
        layers.swiglu(wide.double(), backend="liger")
    monkeypatch.setattr(liger, "_is_installed", lambda: False)
    remedy = re.escape(f"not installed: {install('gpu')}; take backend='chunked'")
    with pytest.raises(ValueError, match=remedy):
        layers.swiglu(wide, backend="liger")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [None, "triton", "chunked"])
def test_a_gpu_uses_liger_unless_it_is_turned_off(name, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, name) if name else monkeypatch.delenv(dispatch.VARIABLE, False)
    x, weight = torch.randn(3, 8, device="cuda"), torch.ones(8, device="cuda", requires_grad=True)
    taken = "LigerRMSNorm" in type(layers.rms_norm(x, weight, 1e-5).grad_fn).__name__
    assert taken == (name != "chunked")
