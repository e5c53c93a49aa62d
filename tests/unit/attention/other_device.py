"""Training steps on a device that is not the CPU, without such a device: tensors have a place and no contents.

    python -m tests.unit.attention.other_device

prints a line of JSON per mechanism and direction: what a step did wrong, or where the host waited for the device. In a
process of its own, because torch keeps the invented device until its end.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import megakernel
from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import OneProcess
from tests.unit.attention.mechanisms import CONFIGS, DIRECTIONS, HEADS, KV_HEADS, MAX_POSITIONS, TREES, WIDTH

DEVICE = "invented"

LAYERS = 2

READ = torch.ops.aten._local_scalar_dense.default
"""Reads a number; `item`, `tolist` and `bool` of a tensor call it."""


_PACKAGE = Path(megakernel.__file__).parent


def in_package(frame: traceback.FrameSummary) -> str | None:
    """The file of a frame, relative to the package's folder; None for one outside of it."""
    file = Path(frame.filename)
    return str(file.relative_to(_PACKAGE)) if file.is_relative_to(_PACKAGE) else None


class HostWaits(TorchDispatchMode):
    """Records where the host reads a number of the device, or copies a tensor from it; it reads 1 or True."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_copy = function is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if (function is READ or is_copy) and args[0].device.type == DEVICE:
            frames = traceback.extract_stack()
            self.places.append(next(f"{in_package(x)}:{x.name}" for x in reversed(frames) if in_package(x)))
            if function is READ:
                return args[0].dtype == torch.bool or 1
        return function(*args, **kwargs)


def move(model: LanguageModel) -> None:
    """Replace all parameters and buffers by ones on the device."""
    for module in model.modules():
        for name, x in list(module.named_parameters(recurse=False)):
            empty = torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
            setattr(module, name, nn.Parameter(empty, x.requires_grad))
        for name, x in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(x.shape, dtype=x.dtype, device=DEVICE))
        if (rotary := getattr(module, "rotary", None)) is not None:  # copies its frequencies to a device once
            empty = torch.empty(rotary.frequencies.shape, dtype=torch.float64, device=DEVICE)
            rotary._device_frequencies[empty.device] = empty


def run(name: str, causal: bool) -> list[str]:
    """Where the host waits in a training step of a model with this mechanism."""
    learned = {"position": "learned", "max_positions": MAX_POSITIONS}
    # Linformer's matrices need a longest sequence.
    position = {"position": "rope"} if causal or CONFIGS[name].far_rope != "none" else learned
    config = Model.model_validate(
        {
            **{"num_layers": LAYERS, "hidden_size": 24, "num_heads": HEADS, "num_kv_heads": KV_HEADS},
            **{"head_dim": WIDTH, "vocab_multiple": 8, "kind": "causal_lm" if causal else "masked_lm"},
            **{**position, "attention": TREES[name]},
        }
    )
    model = LanguageModel(ModelSettings(config, vocab_size=40, mesh=OneProcess()))
    with FakeTensorMode(), HostWaits() as waits:
        move(model)
        positions = torch.arange(MAX_POSITIONS // 2, device=DEVICE).repeat(2)[None]
        tokens, labels = torch.zeros(2, 1, MAX_POSITIONS, dtype=torch.int64, device=DEVICE)
        if causal:
            model(tokens, positions, labels, torch.full((1,), MAX_POSITIONS, device=DEVICE)).backward()
        else:  # without the loss, which takes as many rows as there are masked tokens
            model.hidden(tokens, positions).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is None or parameter.grad.device.type == DEVICE
    return waits.places


def results() -> Iterator[dict[str, Any]]:
    """One result per configuration and direction."""
    for name, causal in DIRECTIONS:
        result: dict[str, Any] = {"name": name, "causal": causal}
        try:
            result["waits"] = run(name, causal)
        except Exception as error:
            frames = [x for x in traceback.extract_tb(error.__traceback__) if in_package(x)]
            place = f"{in_package(frames[-1])}:{frames[-1].lineno}: " if frames else ""
            result["problem"] = f"{place}{type(error).__name__}: {error}"
        yield result


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(DEVICE)
    for result in results():
        json.dump(result, sys.stdout)
        print()
    sys.stdout.flush()
    # Autograd's thread for the device runs on, and may abort a process that ends as usual.
    os._exit(0)
