"""torch.load for files that somebody else may have written: tensors and plain data come in, no code is run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megakernel.config.errors import UserError, first_line

_OF_DEEPSPEED = {
    "deepspeed.utils.tensor_fragment.fragment_address": SimpleNamespace,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": SimpleNamespace,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}
"""Classes that DeepSpeed writes besides tensors -> what stands for them here: no second of its imports is needed."""

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""torch's variable that overrules a caller's weights_only=False."""


def load(file: Path) -> Any:
    """What lies in a file of torch.save, its tensors mapped and not read.

    Raises UserError for what names anything but tensors and plain data, and for what is no such file.
    """
    try:
        with _allowed():
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    # A damaged file can raise nearly anything.
    except Exception as error:
        reason = f"it is damaged ({first_line(error)})"
        try:
            check(file)
        except UserError as refusal:
            reason = str(refusal)
        raise UserError(f"{file} cannot be used: {reason}") from None


def check(file: Path, name: str = "it") -> None:
    """UserError where `load` would refuse what a file names, which begins with `name`; nothing is loaded."""
    try:
        with _allowed():
            foreign = get_unsafe_globals_in_checkpoint(file)
    except OSError:
        raise
    except Exception as error:
        raise UserError(f"{name} is damaged ({first_line(error)})") from None
    if foreign:
        found = ", ".join(sorted(foreign))
        raise UserError(f"{name} names {found}, which is code and no tensor: loading it could run anything")


@contextmanager
def enforced() -> Iterator[None]:
    """Within, torch.load is weights-only, whatever its caller asks for, as DeepSpeed's does."""
    paths = (path.rpartition(".") for path in _OF_DEEPSPEED)
    classes = [getattr(import_module(module), name) for module, _, name in paths]
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with safe_globals(classes):
            yield
    finally:
        del os.environ[_FORCE]
        if before is not None:
            os.environ[_FORCE] = before


def _allowed() -> safe_globals:
    return safe_globals([(stand_in, name) for name, stand_in in _OF_DEEPSPEED.items()])
