"""Traces of the steps of a process, and snapshots of its device's memory, as files to look at."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megakernel.config import Profile

_MOST_ALLOCATIONS = 100_000
"""Allocations of which a snapshot tells where they were made."""


class Profiler(AbstractContextManager["Profiler"]):
    """Records the configured steps; for the length of a `with` block, so that a run that ends early keeps its trace.

    RUN/profile/step_S/rank_R.json.gz: a Chrome trace from step S on, for https://ui.perfetto.dev, with
    phases of a step, forward passes of layers and their attention by name, operations and kernels.
    rank_R.memory.pickle beside it: on CUDA, allocations and who made them, for https://pytorch.org/memory_viz.
    A run that has passed these steps records nothing, nor one that continues in the midst of them.
    """

    def __init__(
        self,
        wanted: Profile | None,
        model: nn.Module,
        run: Path,
        rank: int,
        device: torch.device,
        note: Callable[[str], None],
        excluded: Callable[[], AbstractContextManager[None]],
    ):
        """excluded: put around time that is no part of a step."""
        self._wanted = wanted
        self._model = model
        self._layers = ExitStack()
        self._device = device
        self._note = note
        self._excluded = excluded
        self._profile: profile | None = None
        if wanted is not None:
            self._folder = run / "profile" / f"step_{wanted.start}"
            self._trace = self._folder / f"rank_{rank}.json.gz"
            self._memory = self._folder / f"rank_{rank}.memory.pickle"

    def __exit__(self, *exception: object) -> None:
        if self._profile is not None:
            self._write()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around step `step`, counted from 1."""
        if self._wanted is None:
            yield
            return
        if step == self._wanted.start:
            self._begin()
        with record_function(f"step {step}"):
            yield
        if self._profile is not None and step == self._wanted.start + self._wanted.steps - 1:
            with self._excluded():
                self._write()

    def _begin(self) -> None:
        on_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda
        if on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        _name_layers(self._model, self._layers)
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def _write(self) -> None:
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        recorded.stop()
        self._layers.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        staged = self._trace.with_name(f"partial.{self._trace.name}")  # packed for its ending
        recorded.export_chrome_trace(str(staged))
        staged.replace(self._trace)
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._note(f"profile of {self._folder.name} in {self._folder}")


def _name_layers(model: nn.Module, until: ExitStack) -> None:
    """Let the forward passes of our own modules appear in traces by name, until `until` is closed."""

    def name_it(name: str, module: nn.Module) -> None:
        entered: list[record_function] = []

        def enter(*_: object) -> None:
            entered.append(record_function(name))
            entered[-1].__enter__()

        def leave(*_: object) -> None:
            entered.pop().__exit__(None, None, None)

        until.callback(module.register_forward_pre_hook(enter).remove)
        until.callback(module.register_forward_hook(leave).remove)

    for name, module in model.named_modules():
        if name and type(module).__module__.startswith("megakernel."):
            name_it(f"{name} ({type(module).__name__})", module)


@contextmanager
def kept_when_memory_runs_out(run: Path, rank: int) -> Iterator[None]:
    """Within, a CUDA device out of memory leaves RUN/profile/out_of_memory/rank_R.memory.pickle behind.

    The error goes on its way. On CPU there is nothing to write: the system ends a process that asks for too much.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        file = run / "profile" / "out_of_memory" / f"rank_{rank}.memory.pickle"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        hint = f"{file} says what filled the device; open it on https://pytorch.org/memory_viz"
        print(f"out of memory: {hint}", file=sys.stderr, flush=True)
        raise
