"""What pieces of a sequence send each other, counted where it is sent."""

from collections import Counter
from typing import Literal

from torch import Tensor

Kind = Literal["state", "window", "heads", "tokens", "sums"]
"""Kernel states; a neighbour's last tokens; tokens traded for heads; tokens gathered; sums over pieces."""


class Traffic:
    """Bytes that this process sends over one axis in one layer, and exchanges that kept it waiting.

    Counted are the bytes that leave a process when a collective goes round a ring: what it hands to an all-gather goes
    to each of the others, what it reduces leaves it twice but for its own share.
    """

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._late = 0

    def sends(self, kind: Kind, x: Tensor, times: float = 1.0) -> None:
        """Count `x`, of which this process sends `times` as much."""
        self._sent[kind] += round(x.numel() * x.element_size() * times)

    def sends_and_returns(self, kind: Kind, x: Tensor, result: Tensor, times: float = 1.0) -> None:
        """The same, and as much again when the gradient of `result` comes back the same way."""
        self.sends(kind, x, times)
        if result.requires_grad:
            amount = x.numel() * times / max(1, result.numel())
            result.register_hook(lambda grad: self.sends(kind, grad, amount))

    def waited(self, finished: bool) -> None:
        """Count a wait for an exchange that had not `finished` when its result was needed."""
        self._late += not finished

    def take(self) -> tuple[Counter[str], int]:
        """Bytes by kind and late exchanges since the last call."""
        taken = self._sent, self._late
        self._sent, self._late = Counter(), 0
        return taken
