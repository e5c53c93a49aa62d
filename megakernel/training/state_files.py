"""The files of a checkpoint: what DeepSpeed puts into them, and how they are written."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from megakernel.checkpoint.manifest import RecordedFile, SavedFile

_MODULE = "module"
"""DeepSpeed's key of the model's state in a file."""

States = Mapping[str, Any]
"""Path of a file -> the state that DeepSpeed writes there: nested containers with tensors."""


class StateFiles:
    """A DeepSpeed checkpoint engine that only collects what save_checkpoint would write; `write` does that later.

    save_checkpoint ends in a barrier. If a rank raised in it, as on a full disk, the others would wait there until the
    collective times out.

    left_out: names of weights that files of the model do not have, because those of the optimizer do. Otherwise one
    data rank would write them, and every rank would read them twice.
    """

    def __init__(self, engine: Any, left_out: Iterable[str] = ()):
        # `check_deepspeed_keys` refuses others.
        assert type(engine.checkpoint_engine) is TorchCheckpointEngine
        self._inner = engine.checkpoint_engine
        self._module = engine.module
        self._left_out = frozenset(left_out)
        self._states: dict[str, Any] = {}

    @classmethod
    def install(cls, engine: Any, left_out: Iterable[str] = ()) -> "StateFiles":
        """Wrap a DeepSpeed engine's checkpoint engine; once, after deepspeed.initialize."""
        engine.checkpoint_engine = cls(engine, left_out)
        # With ZeRO, rank 0 also copies a conversion script next to the checkpoints, bypassing the checkpoint engine:
        # one more write that can fail, and `megakernel export` replaces that script.
        engine._copy_recovery_script = lambda save_path: None
        return engine.checkpoint_engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: rank 0 has made the folder, which every rank would otherwise make and look for again."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the state of one file. Its tensors are those that training changes."""
        if self._left_out and _MODULE in state_dict:
            kept = {name: one for name, one in state_dict[_MODULE].items() if name not in self._left_out}
            state_dict = {**state_dict, _MODULE: kept}
        self._states[path] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file, whose weights that were left out are those that the model has."""
        state = self._inner.load(path, map_location)
        if self._left_out and _MODULE in state:
            present = self._module.state_dict()
            state[_MODULE] = {name: present[name] for name in self._left_out} | state[_MODULE]
        return state

    def take(self) -> States:
        """The states since the last call."""
        states, self._states = self._states, {}
        return states

    def write(self, states: States, folder: Path, abandoned: Event) -> dict[str, SavedFile]:
        """Write and flush files; returns their records by name relative to `folder`.

        abandoned: ends the writing, with `Abandoned`, once it is set. Raises OSError.
        """
        records = {}
        for path, state in states.items():
            with RecordedFile(Path(path), abandoned) as file:
                self._inner.save(state, file)
            records[Path(path).relative_to(folder).as_posix()] = file.record
        return records
