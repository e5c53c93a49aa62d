"""A differentiable scan over groups of tokens with activation recomputation.

Forward saves only the carry at group boundaries; backward recomputes each group. Intermediate tensors (features,
weights, chunk states) exist for one group at a time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megakernel.ops.dispatch import in_own_dtypes
from megakernel.ops.documents import Positions
from megakernel.ops.tensors import Tensors, split

SHORT = 512
"""Sequences of one group and at most this many tokens run without recomputation.

Their autograd graph takes 4 to 6 times the memory of q, k and v in every layer (float32, d = 64).
"""

Step = Callable[[Positions, Tensors, Tensors, Tensors], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
"""(positions of this group, carry, sequences of this group, shared) -> (outputs of this group, next carry)."""


def scan_groups(
    step: Step,
    carry: Tensors,
    sequences: Tensors,
    shared: Tensors,
    *,
    group: int,
    positions: Positions = 0,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run `step` over consecutive groups of `group` tokens.

    Dimension 2 of `sequences` and outputs is tokens. The carry is passed from group to group; `shared` is passed to
    all and may hold named tuples of tensors. A single group of at most SHORT tokens runs as plain autograd, without
    recomputation. Differentiable once. positions: (B, N), or the position of the first token.
    """
    length = next(x for x in sequences if x is not None).shape[2]
    if length <= min(group, SHORT):
        return step(positions, carry, sequences, shared)
    flat, tree = tree_flatten(shared)
    first = positions if isinstance(positions, int) else 0
    sequences = (*sequences, None if isinstance(positions, int) else positions[:, None])

    def flat_step(start: int, carry: Tensors, sequences: Tensors, leaves: Tensors):
        *others, at = sequences
        group_positions = first + start if at is None else at[:, 0]
        return step(group_positions, carry, tuple(others), tree_unflatten(leaves, tree))

    if torch.compiler.is_compiling():
        return _unrolled(flat_step, carry, sequences, tuple(flat), group, length)
    sizes = (len(carry), len(sequences))
    results = _GroupScan.apply(flat_step, group, length, sizes, *carry, *sequences, *flat)
    return results[: -len(carry)] if carry else results, results[-len(carry) :] if carry else ()


def _unrolled(
    step: Callable[..., tuple[Tensors, Tensors]],
    carry: Tensors,
    sequences: Tensors,
    shared: Tensors,
    group: int,
    length: int,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The groups one after another in plain autograd: a compiler cannot trace a backward that asks for gradients."""
    parts = []
    for start in range(0, length, group):
        outputs, carry = step(start, carry, _take(sequences, start, min(group, length - start)), shared)
        parts.append(outputs)
    return tuple(torch.cat(part, 2) for part in zip(*parts)), carry


def _take(tensors: Sequence[Tensor | None], start: int, count: int) -> Tensors:
    # Contiguous: otherwise each matrix product of the step would copy.
    return tuple(None if x is None else x.narrow(2, start, count).contiguous() for x in tensors)


def _leaves(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> Tensors:
    return tuple(
        None if x is None else x.detach().requires_grad_(need and x.is_floating_point())
        for x, need in zip(tensors, needed)
    )


class _GroupScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, step, group, length, sizes, *tensors):
        carry, sequences, shared = split(tensors, *sizes)
        boundaries: list[Tensor] = []
        wholes: list[Tensor] = []
        for start in range(0, length, group):
            count = min(group, length - start)
            boundaries.extend(carry)
            outputs, carry = step(start, carry, _take(sequences, start, count), shared)
            if not wholes:
                wholes = [x.new_empty(*x.shape[:2], length, *x.shape[3:]) for x in outputs]
            for whole, part in zip(wholes, outputs):
                whole.narrow(2, start, count).copy_(part)
        ctx.step, ctx.group, ctx.length, ctx.sizes, ctx.num_outputs = step, group, length, sizes, len(wholes)
        ctx.save_for_backward(*sequences, *shared, *boundaries)
        ctx.set_materialize_grads(False)
        return (*wholes, *carry)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        need_carry, need_sequences, need_shared = split(ctx.needs_input_grad[4:], *ctx.sizes)
        sequences, shared, boundaries = split(ctx.saved_tensors, len(need_sequences), len(need_shared))
        num_carry = len(need_carry)
        grad_outputs, grad_carry = grads[: ctx.num_outputs], grads[ctx.num_outputs :]
        grad_sequences = [torch.zeros_like(x) if need else None for x, need in zip(sequences, need_sequences)]
        grad_shared: list[Tensor | None] = [None] * len(shared)
        for start in reversed(range(0, ctx.length, ctx.group)):
            index = start // ctx.group
            count = min(ctx.group, ctx.length - start)
            # Inside the sequence the carry needs a gradient even if the initial one does not.
            carry = _leaves(
                boundaries[index * num_carry : (index + 1) * num_carry],
                need_carry if index == 0 else [True] * num_carry,
            )
            parts = _leaves(_take(sequences, start, count), need_sequences)
            common = _leaves(shared, need_shared)
            with torch.enable_grad():
                # As in forward, whose op runs without autocast.
                outputs, left = in_own_dtypes(ctx.step)(start, carry, parts, common)
            grad_carry, grad_parts, grad_common = in_own_dtypes(_gradients)(
                (*outputs, *left), (*_take(grad_outputs, start, count), *grad_carry), (carry, parts, common)
            )
            for whole, part in zip(grad_sequences, grad_parts):
                if whole is not None and part is not None:
                    whole.narrow(2, start, count).copy_(part)
            grad_shared = [
                new if old is None else old if new is None else old + new
                for old, new in zip(grad_shared, grad_common)
            ]
        return (None, None, None, None, *grad_carry, *grad_sequences, *grad_shared)


def _gradients(
    results: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: tuple[Tensors, Tensors, Tensors]
) -> list[Tensors]:
    flat = [x for part in inputs for x in part]
    wanted = [i for i, x in enumerate(flat) if x is not None and x.requires_grad]
    live = [(y, g) for y, g in zip(results, grads) if y.requires_grad and g is not None]
    gradients: list[Tensor | None] = [None] * len(flat)
    if live and wanted:
        outputs, grad_outputs = zip(*live)
        computed = torch.autograd.grad(outputs, [flat[i] for i in wanted], grad_outputs, allow_unused=True)
        for i, grad in zip(wanted, computed):
            gradients[i] = grad
    return split(gradients, len(inputs[0]), len(inputs[1]))
