"""Profiler traces of steps, and snapshots of CUDA memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megakernel.config import Profile
from megakernel.model.layer import TransformerLayer

_MOST_ALLOCATIONS = 100_000
"""Allocations in a snapshot with their stack."""


class Profiler(AbstractContextManager["Profiler"]):
    """Records the configured steps; its `with` block writes the trace even if the run ends early.

    RUN/profile/step_S/rank_R.json.gz: a Chrome trace from step S on, for https://ui.perfetto.dev, with the phases of a
    step, named forward passes of layers and their attention, operations and kernels.
    RUN/profile/step_S/rank_R.memory.pickle: on CUDA, allocations with stacks, for https://pytorch.org/memory_viz.
    A run that resumes after step S records nothing.
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
        """excluded: context manager for time that is not part of a step."""
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
        """Wraps step `step`, counted from 1."""
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
        staged = self._trace.with_name(f"partial.{self._trace.name}")  # .gz: compressed
        recorded.export_chrome_trace(str(staged))
        staged.replace(self._trace)
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._memory))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._note(f"profile of {self._folder.name} in {self._folder}")


def _name_layers(model: nn.Module, until: ExitStack) -> None:
    """Show forward passes of our modules in traces by name, of compiled layers the whole, until `until` is closed."""

    def add_hooks(name: str, module: nn.Module) -> None:
        open_ranges: list[record_function] = []

        def start(*_: object) -> None:
            open_ranges.append(record_function(name))
            open_ranges[-1].__enter__()

        def stop(*_: object) -> None:
            open_ranges.pop().__exit__(None, None, None)

        until.callback(module.register_forward_pre_hook(start).remove)
        until.callback(module.register_forward_hook(stop).remove)

    compiled = [x for x in model.modules() if isinstance(x, TransformerLayer) and x.is_compiled]
    # With hooks inside, a layer runs as it does without a compiler, and the trace would be that of another run.
    left_out = {id(part) for layer in compiled for part in layer.modules() if part is not layer}
    for name, module in model.named_modules():
        if name and type(module).__module__.startswith("megakernel.") and id(module) not in left_out:
            add_hooks(f"{name} ({type(module).__name__})", module)


@contextmanager
def snapshot_on_out_of_memory(run: Path, rank: int) -> Iterator[None]:
    """Within, write RUN/profile/out_of_memory/rank_R.memory.pickle if CUDA runs out of memory, and re-raise the error.

    On CPU nothing can be written: the system kills the process.
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
