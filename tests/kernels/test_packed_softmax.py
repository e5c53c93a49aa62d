"""Softmax attention within packed documents by the flash attention kernel: its arguments and its results.

Without a GPU, the formula replaces the kernel, which does not exist for CPUs.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megakernel.ops.documents import cu_seqlens_from_positions, positions_from_cu_seqlens
from megakernel.ops.kernels.launch import record_launches
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.softmax_attention.spans import Spans
from tests.kernels.comparing import DEVICE, TOLERANCE, random, rms_ratio

LENGTH = 96


def by_document(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, left: int | None
) -> Iterator[tuple[slice, Tensor, list[Tensor]]]:
    """Of each document: its slice, its weights (H, n, n), and its queries, keys and values (H, n, d) in float32."""
    group = q.shape[1] // k.shape[1]
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist()):
        here = slice(begin, end)
        query, *rest = (x[here].transpose(0, 1).float() for x in (q, k, v))
        key, value = (x.repeat_interleave(group, 0) for x in rest)
        back = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        seen = back >= 0 if left is None else (back >= 0) & (back <= left)
        scores = (query @ key.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        yield here, scores.softmax(-1), [query, key, value]


def forward(
    q, k, v, starts, key_starts, longest, longest_key, dropout, causal, debug, *,
    scale=None, window_size_left=None, window_size_right=None, **rest,
):  # fmt: skip
    assert torch.equal(starts, key_starts)
    assert starts.dtype == torch.int32
    assert int(starts.diff().min()) > 0
    assert int(starts.diff().max()) <= min(longest, longest_key)
    assert causal == (window_size_left is None)
    assert window_size_right == (None if causal else 0)
    assert (dropout, debug, scale) == (0.0, False, None)
    assert not any(x is not None for x in rest.values())
    nothing = q.new_zeros(0)
    out = torch.empty_like(q)
    for here, weights, (_, _, value) in by_document(q, k, v, starts, window_size_left):
        out[here] = (weights @ value).transpose(0, 1)
    return out, nothing, nothing, nothing, nothing


def backward(
    grad, q, k, v, out, logs, starts, key_starts, longest, longest_key, dropout, causal, *rest: Any,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    found = [torch.empty_like(x) for x in (q, k, v)]
    for here, weights, (query, key, value) in by_document(q, k, v, starts, window_size_left):
        of_out = grad[here].transpose(0, 1).float()
        of_weights = of_out @ value.mT
        of_scores = (
            weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        )
        for whole, part in zip(found, (of_scores @ key, of_scores.mT @ query, weights.mT @ of_out)):
            whole[here] = part.unflatten(0, (whole.shape[1], -1)).sum(1).transpose(0, 1)
    return tuple(found)


@pytest.fixture(scope="module", autouse=True)
def kernel() -> Iterator[None]:
    if DEVICE == "cuda":
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        with record_launches():
            yield


def positions(*documents: list[int], padding: int = 0) -> Tensor:
    """Positions of sequences with documents of these lengths, each sequence followed by padding."""
    rows = [[place for size in sizes for place in range(size)] + [-1] * padding for sizes in documents]
    return torch.tensor(rows, device=DEVICE)


SEQUENCES = {
    "documents": positions([1, 40, 55], [96, 0, 0]),
    "padding": positions([50, 36], [86, 0], padding=10),
    "a document that began before": positions([200], [200])[:, -LENGTH:].contiguous(),
}


@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("case", SEQUENCES)
def test_documents_are_attended_without_masks(case, kv_heads, window, monkeypatch):
    shapes = ((2, 4, LENGTH, 32), (2, kv_heads, LENGTH, 32), (2, kv_heads, LENGTH, 32))
    given = [random(*shape, seed=seed, dtype=torch.bfloat16) for seed, shape in enumerate(shapes)]
    leaves, exact = (
        [x.detach().to(dtype).requires_grad_() for x in given] for dtype in (torch.bfloat16, torch.float64)
    )
    options: dict[str, Any] = {"positions": SEQUENCES[case], "window": window}
    monkeypatch.setattr(Spans, "mask", None)
    out, _ = softmax_attention(*leaves, **options)
    monkeypatch.undo()
    expected, _ = softmax_attention(*exact, **options, backend="reference")
    assert rms_ratio(out, expected) < TOLERANCE[torch.bfloat16]
    assert not out[(SEQUENCES[case] < 0)[:, None].expand(-1, 4, -1)].any()
    weights = random(*out.shape, seed=9) * (SEQUENCES[case] >= 0)[:, None, :, None]
    found, wanted = (
        torch.autograd.grad((y * weights).sum(), x) for y, x in ((out, leaves), (expected, exact))
    )
    # In a window of one token, gradients of queries and keys are 0.
    largest = max(x.norm().item() for x in wanted)
    for one, other in zip(found, wanted):
        assert rms_ratio(one, other, 1e-3 * largest) < TOLERANCE[torch.bfloat16]


class Filled(TorchDispatchMode):
    """Elements of every tensor that is made by `masked_fill`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ == "masked_fill":
            self.sizes.append(found.numel())
        return found


@pytest.mark.parametrize("case", SEQUENCES)
def test_only_padding_needs_a_pass_over_the_outputs(case):
    """Forward and backward; the output of padding is 0 whatever the kernel computes there."""
    q, k, v = (random(2, 2, LENGTH, 32, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    # A copy: whether there is padding is looked up once for a tensor of positions, and anew if it is another.
    for at in (SEQUENCES[case], SEQUENCES[case].clone()):
        with Filled() as filled:
            out, _ = softmax_attention(q.requires_grad_(), k, v, positions=at)
            out.backward(torch.ones_like(out))
        assert filled.sizes == [out.numel()] * (2 if case == "padding" else 0)


def test_inputs_that_the_kernel_does_not_support_use_masks():
    q, k, v = (random(1, 2, LENGTH, 32, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    at = positions([40, 56])
    plain, _ = softmax_attention(q, k, v, positions=at)
    in_float32, _ = softmax_attention(q.float(), k.float(), v.float(), positions=at)
    assert rms_ratio(plain, in_float32) < TOLERANCE[torch.bfloat16]
    capped, _ = softmax_attention(q, k, v, positions=at, softcap=1e6)
    assert rms_ratio(capped, in_float32) < TOLERANCE[torch.bfloat16]
    _, cache = softmax_attention(q[:, :, :50], k[:, :, :50], v[:, :, :50], positions=at[:, :50])
    rest, _ = softmax_attention(
        q[:, :, 50:], k[:, :, 50:], v[:, :, 50:], positions=at[:, 50:], initial_state=cache
    )
    assert rms_ratio(rest, plain[:, :, 50:]) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("case", SEQUENCES)
def test_document_starts_follow_from_positions(case):
    at = SEQUENCES[case]
    starts = cu_seqlens_from_positions(at)
    again = positions_from_cu_seqlens(starts, *at.shape)
    places = torch.arange(LENGTH, device=DEVICE)
    real, whole = at >= 0, at <= places
    assert torch.equal(again[real & whole], at[real & whole])
    assert torch.equal(again[~whole], places.expand_as(at)[~whole])
