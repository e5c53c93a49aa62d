"""Saving through DeepSpeed without leaving the other ranks waiting for one that could not write."""

from pathlib import Path
from typing import Any


class DeferredErrors:
    """A DeepSpeed checkpoint engine that remembers a failed write instead of raising it.

    DeepSpeed's save_checkpoint ends in a barrier. A rank that raises before it, on a full disk, would leave
    the others waiting there until the collective times out. Call `raise_first` after save_checkpoint has
    returned.
    """

    def __init__(self, inner: Any):
        self._inner = inner
        self._error: Exception | None = None
        self._written: list[Path] = []

    @classmethod
    def install(cls, engine: Any) -> "DeferredErrors":
        """Make a DeepSpeed engine write through this class; once, after deepspeed.initialize."""
        engine.checkpoint_engine = cls(engine.checkpoint_engine)
        # With ZeRO, rank 0 also copies a conversion script beside the checkpoints, past the checkpoint
        # engine: one more write that can fail, and `megakernel export` does that script's work.
        engine._copy_recovery_script = lambda save_path: None
        return engine.checkpoint_engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; after a first failure write nothing more."""
        if self._error is not None:
            return
        try:
            self._inner.save(state_dict, path)
            self._written.append(Path(path))
        except Exception as error:
            self._error = error

    def raise_first(self) -> None:
        """Raise the remembered failure, if any, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take_written(self) -> list[Path]:
        """The files written since the last call."""
        written, self._written = self._written, []
        return written
