"""What implementations that are not ours read and write, counted from what they launch.

They run on one head of TOKENS tokens on the CPU: torch's ops are computed, Triton kernels noted down instead of
started. A launch reads or writes each of its tensors once, whatever its programs read again, and its operations are
taken as hidden behind that: both in favour of the implementation. All bytes grow with the tokens and nothing else.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import KernelInterface

from .cases import Case
from .contenders import CONTENDERS
from .cost import Cost
from .passes import DTYPES, Pass

TOKENS = 1024
"""Of the row that runs."""

FREE = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "detach"))
"""Ops of torch that neither read nor write."""


class _Noted(TorchDispatchMode):
    """Adds a pass for each of torch's ops."""

    def __init__(self, passes: list[Pass]):
        super().__init__()
        self.passes = passes

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__
        if not op.is_view and name not in FREE:
            self.passes.append(_pass(name, (args, kwargs, found)))
        return found


def _pass(name: str, tensors: Any) -> Pass:
    """One that reads or writes every tensor once; of an expanded one, what is stored."""
    kept = [x for x in tree_leaves(tensors) if isinstance(x, Tensor)]
    return Pass(name, Cost(sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in kept), 0))


@contextmanager
def _noting() -> Iterator[list[Pass]]:
    """The passes of all that runs meanwhile; Triton kernels do not run."""
    passes: list[Pass] = []
    start = KernelInterface.__getitem__

    def noted(kernel: Any, grid: Any) -> Any:
        return lambda *args, **kwargs: passes.append(_pass(_name(kernel), (args, kwargs)))

    KernelInterface.__getitem__ = noted
    try:
        with _Noted(passes):
            yield passes
    finally:
        KernelInterface.__getitem__ = start


def _name(kernel: Any) -> str:
    """Of the function under its autotuners and heuristics."""
    while not hasattr(kernel, "__name__"):
        kernel = kernel.fn
    return kernel.__name__


def launched(name: str, case: Case, element: int, backward: bool) -> list[Pass] | None:
    """The passes of a contender of another's making; None where its package is not installed.

    element: bytes of a number of q, k and v, 2 or 4.
    """
    if CONTENDERS[name].needs_fla and importlib.util.find_spec("fla") is None:
        return None
    forward, back = counted(name, case.head_dim, element)
    scale = case.all_tokens * case.heads / TOKENS
    passes = forward + back if backward else forward
    return [Pass(one.name, Cost(scale * one.cost.bytes, 0)) for one in passes]


@cache
def counted(name: str, head_dim: int, element: int) -> tuple[list[Pass], list[Pass]]:
    """The passes of forward and of backward for one row of one head."""
    contender = CONTENDERS[name]
    assert contender.build is not None
    core = contender.build()
    shape = (1, TOKENS, 1, head_dim) if contender.tokens_first else (1, 1, TOKENS, head_dim)
    leaves = [torch.zeros(shape, dtype=DTYPES[element], requires_grad=True) for _ in range(3)]
    pull = torch.zeros(shape, dtype=DTYPES[element])
    with _noting() as passes:
        out = core(*leaves)
        ahead = len(passes)
        torch.autograd.grad(out, leaves, pull)
    return passes[:ahead], passes[ahead:]
