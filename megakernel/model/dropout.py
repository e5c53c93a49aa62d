"""Dropout of a layer: where it is, with which probability, and for which tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megakernel.ops.dropout import dropout, stream_of

if TYPE_CHECKING:
    from megakernel.parallel import Mesh, OneProcess


@dataclass(frozen=True)
class PlacedDropout:
    """A dropout of `model.dropout`; not a module, because it has no state."""

    probability: float

    stream: int
    """Of its place in the model."""

    @classmethod
    def at(cls, probability: float, *place: int | str) -> "PlacedDropout":
        """The dropout of a place, such as ("attention", layer)."""
        return cls(probability, stream_of(*place))

    def __call__(self, x: Tensor, numbers: Tensor | None, first_channel: int = 0) -> Tensor:
        """x (N, B, C) with numbers of the tokens (N, B); x itself without them, as in evaluation."""
        if numbers is None or self.probability == 0:
            return x
        return dropout(x, numbers, self.probability, self.stream, first_channel)


def own_tokens(numbers: Tensor | None, mesh: "Mesh | OneProcess") -> Tensor | None:
    """Numbers of tokens (B, N) as (N, B), of the N / tp that hidden states hold under sequence parallelism."""
    if numbers is None:
        return None
    return numbers.T.chunk(mesh.tp.size)[mesh.tp.rank] if mesh.sequence_parallel else numbers.T
