"""torch.load for untrusted files: it loads tensors and plain data, and runs no code."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, IntEnum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megakernel.config.errors import UserError, first_line


class _ZeroStage(IntEnum):
    """Members of DeepSpeed's ZeroStageEnum."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


_DEEPSPEED_STAND_INS = {
    "deepspeed.utils.tensor_fragment.fragment_address": SimpleNamespace,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": SimpleNamespace,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _ZeroStage,
}
"""Classes that DeepSpeed pickles besides tensors -> stand-ins, so that loading need not import DeepSpeed."""


def _member(enumeration: type[Enum], name: str) -> Enum:
    """What `getattr` stands for in a file: Python 3.11.0 to 3.11.3 pickle a member of an enumeration with it."""
    if not issubclass(enumeration, Enum):
        raise UserError(_refusal("it", f"{enumeration.__name__}.{name}"))
    return enumeration[name]


def _refusal(file: str, names: str) -> str:
    return f"{file} names {names}, which is code, not a tensor: loading it could run anything"


_GETATTR = (_member, "builtins.getattr")

_FORCE_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's environment variable that overrides a caller's weights_only=False."""


def load(file: Path) -> Any:
    """Load a file of torch.save, with memory-mapped tensors.

    Raises UserError if the file names anything but tensors and plain data, is damaged or cannot be read.
    """
    try:
        with _allowed():
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from None
    except UserError as refusal:
        raise UserError(f"{file} cannot be used: {refusal}") from None
    # A damaged file can raise almost any exception.
    except Exception as error:
        reason = f"it is damaged ({first_line(error)})"
        try:
            check(file)
        except UserError as refusal:
            reason = str(refusal)
        raise UserError(f"{file} cannot be used: {reason}") from None


def check(file: Path, name: str = "it") -> None:
    """Raise UserError, with a message that begins with `name`, if `load` would refuse the file; loads nothing.

    It does not see what a file asks a permitted class for; `load` refuses that itself.
    """
    try:
        with _allowed():
            foreign = get_unsafe_globals_in_checkpoint(file)
    except OSError:
        raise
    except Exception as error:
        raise UserError(f"{name} is damaged ({first_line(error)})") from None
    if foreign:
        raise UserError(_refusal(name, ", ".join(sorted(foreign))))


@contextmanager
def enforce() -> Iterator[None]:
    """Make torch.load weights-only even for callers, such as DeepSpeed, that pass weights_only=False."""
    paths = (path.rpartition(".") for path in _DEEPSPEED_STAND_INS)
    classes = [getattr(import_module(module), name) for module, _, name in paths]
    before = os.environ.get(_FORCE_VARIABLE)
    os.environ[_FORCE_VARIABLE] = "1"
    try:
        with safe_globals([*classes, _GETATTR]):
            yield
    finally:
        del os.environ[_FORCE_VARIABLE]
        if before is not None:
            os.environ[_FORCE_VARIABLE] = before


def _allowed() -> safe_globals:
    return safe_globals([*((stand_in, name) for name, stand_in in _DEEPSPEED_STAND_INS.items()), _GETATTR])
