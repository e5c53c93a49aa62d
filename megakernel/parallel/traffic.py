"""Counts the bytes that context-parallel shards send each other."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from megakernel.parallel.progress import Progress

Kind = Literal["state", "window", "heads", "keys", "tokens", "sums"]
"""Kernel states; halos; the Ulysses all-to-all; keys, values and their gradients in ring attention; gathered tokens;
all-reduced sums."""


class Traffic:
    """Bytes that this process sends over one axis in one layer, and exchanges that it had to wait for.

    Collectives are counted as ring algorithms: an all-gather sends a process's input P - 1 times, an all-reduce sends
    it 2 (P - 1) / P times.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        """progress: of the process, in which every wait is recorded."""
        self._progress = progress or Progress()
        self._sent: Counter[str] = Counter()
        self._late = 0

    def add(self, kind: Kind, x: Tensor | None, times: float = 1.0) -> None:
        """Count `x`, sent `times` times; None is a gradient that does not exist."""
        if x is None:
            return
        self._sent[kind] += round(x.numel() * x.element_size() * times)

    def add_both_ways(self, kind: Kind, x: Tensor, result: Tensor, times: float = 1.0) -> None:
        """Count `x`, and as many bytes again when backward sends the gradient of `result`."""
        self.add(kind, x, times)
        if result.requires_grad:
            amount = x.numel() * times / max(1, result.numel())
            result.register_hook(lambda grad: self.add(kind, grad, amount))

    @contextmanager
    def waiting(self, kind: Kind, finished: bool = True) -> Iterator[None]:
        """Encloses a wait, which counts as late unless `finished`: local work was over before the exchange."""
        self._late += not finished
        with self._progress.waiting(f"exchange of {kind}"):
            yield

    def take(self) -> tuple[Counter[str], int]:
        """Bytes per kind and the number of late exchanges since the last call."""
        counts = self._sent, self._late
        self._sent, self._late = Counter(), 0
        return counts
