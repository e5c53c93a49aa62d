"""Selects the implementation of an op."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

VARIABLE = "MEGAKERNEL_BACKEND"
EVERYWHERE = "chunked"
KERNELS = "triton"
COMPOSED = "composed"
"""FLuRKA's kernels, taken apart: an experiment, see `flurka_attention.composed`. Never chosen by default."""
LIBRARY = "liger"
"""Liger-Kernel's Triton kernels."""


class Kernels:
    """The Triton implementation of an op: a function of a module that is imported on first use.

    op: the op's name. load: imports the module, with an import statement, the only way that torch.compile can trace.
    The module's `unsupported` takes the same arguments and returns why the kernels cannot take them, or None.
    """

    def __init__(
        self, op: str, load: Callable[[], ModuleType], function: str = "attend", backend: str | None = None
    ) -> None:
        self.op = op
        self.load = load
        self.function = function
        self.backend = backend or (KERNELS if function == "attend" else LIBRARY)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernels; ValueError with the reason if they cannot take the arguments."""
        from megakernel.ops.kernels.launch import unsupported_device

        reason = unsupported_device(args[0].device) or self.reason_against(*args, **kwargs)
        if reason is not None:
            raise ValueError(f"backend='{self.backend}': {reason}; take backend='{EVERYWHERE}'")
        return self.function_of_module()(*args, **kwargs)

    def reason_against(self, *args: Any, **kwargs: Any) -> str | None:
        """Why the kernels cannot take the arguments; None if they can."""
        if self.function == "attend" and (reason := _miscompiled(args[0])) is not None:
            return reason
        return self.load().unsupported(*args, **kwargs)

    def function_of_module(self) -> Callable[..., Any]:
        """Runs the kernels on supported arguments."""
        function: Callable[..., Any] = getattr(self.load(), self.function)
        return function


Implementation = Callable[..., Any]


def choose(implementations: Mapping[str, Implementation], backend: str | None) -> Implementation:
    """The implementation named by `backend`, else by the environment's MEGAKERNEL_BACKEND, else the fastest.

    The fastest is the Triton (else Liger) one for tensors on a GPU if it supports the arguments, else the chunked one.
    MEGAKERNEL_BACKEND=triton applies to ops with Triton kernels, composed to FLuRKA; the others run their fastest
    implementation. It runs without autocast: see `in_own_dtypes`.
    """
    name = backend or os.environ.get(VARIABLE) or None
    if name is None or (name in (KERNELS, COMPOSED) and not backend and name not in implementations):
        chosen: Implementation = partial(_fastest, implementations)
    elif name in implementations:
        chosen = implementations[name]
    else:
        source = "backend" if backend else VARIABLE
        raise ValueError(f"{source}={name!r}: expected one of {', '.join(implementations)}")
    # Asked here as well, because decoding a token chooses many times.
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return in_own_dtypes(chosen)
    return chosen


def in_own_dtypes(function: Implementation) -> Implementation:
    """`function` without torch.autocast, which would round the factors and sums of an op's products."""
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type):
            function = torch.autocast(device_type, enabled=False)(function)
    return function


def _fastest(implementations: Mapping[str, Implementation], *args: Any, **kwargs: Any) -> Any:
    kernels = implementations.get(KERNELS)
    # A compiler fuses the formulas with their neighbors, and cannot look into Liger-Kernel's functions.
    if kernels is None and args[0].is_cuda and not torch.compiler.is_compiling():
        kernels = implementations.get(LIBRARY)
    if isinstance(kernels, Kernels) and (args[0].is_cuda or is_recording()):
        reason = kernels.reason_against(*args, **kwargs)
        if reason is None:
            return kernels.function_of_module()(*args, **kwargs)
        _warn_once(kernels.op, reason)
    return implementations[EVERYWHERE](*args, **kwargs)


_as_on_gpu = False


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Choose PyTorch's implementations for a GPU, as if tensors were on one; `record_launches` does it for kernels."""
    global _as_on_gpu
    _as_on_gpu = True
    try:
        yield
    finally:
        _as_on_gpu = False


def runs_on_gpu(x: torch.Tensor) -> bool:
    """Whether `x` is on a GPU, or implementations are chosen as if it were."""
    return x.is_cuda or _as_on_gpu or is_recording()


def is_recording() -> bool:
    """Whether kernel launches are recorded instead of made, so that their outputs are uninitialized."""
    launch = sys.modules.get("megakernel.ops.kernels.launch")
    return launch is not None and launch.is_recording()


@cache
def _warn_once(op: str, reason: str) -> None:
    warnings.warn(f"{op} runs without its kernels: {reason}", RuntimeWarning, stacklevel=2)


def _miscompiled(x: torch.Tensor) -> str | None:
    from megakernel.ops.kernels import assembler
    from megakernel.ops.kernels.launch import capability_of

    return assembler.problem(capability_of(x.device)) if x.is_cuda else None
