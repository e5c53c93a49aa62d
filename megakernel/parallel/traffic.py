"""Bytes that the shards of a sequence send each other, counted where they are sent."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import Tensor

from megakernel.parallel.progress import Progress

Kind = Literal["state", "window", "heads", "keys", "tokens", "sums"]
"""Kernel states; a neighbour's last tokens; tokens traded for heads; keys and values that go round, and their
gradients; tokens gathered; sums over shards."""


class Traffic:
    """Bytes that this process sends over one axis in one layer, and exchanges that kept it waiting.

    Counted are the bytes that leave a process when a collective goes round a ring: what it hands to an all-gather goes
    to each of the others, what it reduces leaves it twice but for its own share.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        """progress: of the process; it learns of every wait."""
        self._progress = progress or Progress()
        self._sent: Counter[str] = Counter()
        self._late = 0

    def sends(self, kind: Kind, x: Tensor | None, times: float = 1.0) -> None:
        """Count `x`, of which this process sends `times` as much; None is a gradient that nobody gave."""
        if x is None:
            return
        self._sent[kind] += round(x.numel() * x.element_size() * times)

    def sends_and_returns(self, kind: Kind, x: Tensor, result: Tensor, times: float = 1.0) -> None:
        """Count `x`, and as much again when the gradient of `result` comes back the same way."""
        self.sends(kind, x, times)
        if result.requires_grad:
            amount = x.numel() * times / max(1, result.numel())
            result.register_hook(lambda grad: self.sends(kind, grad, amount))

    @contextmanager
    def waiting(self, kind: Kind, finished: bool = True) -> Iterator[None]:
        """Around a wait; not `finished`: it is counted, because local work was over before the exchange."""
        self._late += not finished
        with self._progress.waiting(f"exchange of {kind}"):
            yield

    def take(self) -> tuple[Counter[str], int]:
        """Bytes by kind and late exchanges since the last call."""
        taken = self._sent, self._late
        self._sent, self._late = Counter(), 0
        return taken
