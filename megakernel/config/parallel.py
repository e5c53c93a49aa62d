"""The parallel section: how the world of processes is cut."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from .errors import Problem
from .section import Section

SoftmaxExchange = Literal["auto", "heads", "ring"]

_LARGEST_BUCKET = 500_000_000
"""DeepSpeed's default: 2 GB in float32, made whole however few the gradients are."""


def reduce_bucket(gradients: int) -> int:
    """Gradients that ZeRO's buffer holds, and reduces at once."""
    return min(gradients, _LARGEST_BUCKET)


class Parallel(Section):
    """World = tensor x context x data x pipeline, tensor fastest; data is what is left of the world."""

    tensor: int = Field(default=1, gt=0, le=1_000_000)
    """Processes that share each layer's heads and MLP width."""

    sequence_parallel: bool = False
    """Megatron sequence parallelism: norms and residuals are cut along the sequence over the tensor ranks."""

    context: int = Field(default=1, gt=0, le=1_000_000)
    """Processes that share one sequence; each holds a contiguous shard."""

    state_exchange: Literal["auto", "gather", "ring"] = "auto"
    """How kernel states reach the other context ranks: all to all at once, or summed from rank to rank."""

    softmax_exchange: SoftmaxExchange = "auto"
    """Full softmax over context ranks: `heads` trades tokens for heads, `ring` passes keys; auto: heads if possible."""

    pipeline: int = Field(default=1, gt=0, le=1_000_000)
    """Pipeline stages."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO: 0 shards nothing (float32 only), 1 optimizer state, 2 also gradients, 3 also weights."""

    timeout_minutes: float = Field(default=10.0, gt=0, le=1_000_000)
    """A collective that waits longer ends the job, and a first step that makes no progress for as long."""

    stall_minutes: float = Field(default=5.0, gt=0, le=1_000_000)
    """A later step that makes no progress for as long ends the job, which says what rank the others wait for."""

    @property
    def model_size(self) -> int:
        """Processes that hold one copy of the model and one sample: tensor x context x pipeline."""
        return self.tensor * self.context * self.pipeline

    def problems(self) -> Iterator[Problem]:
        """What the libraries do not combine."""
        if self.pipeline > 1 and self.zero_stage > 1:
            reason = (
                f"with pipeline={self.pipeline} is beyond DeepSpeed's pipeline engine, which supports 0 and 1"
            )
            yield self.problem("zero_stage", reason, "set zero_stage to 1 or pipeline to 1")
        for key in ("state_exchange", "softmax_exchange"):
            if self.context == 1 and self.sets(key):
                remedy = "remove it or set context above 1"
                yield self.problem(key, "has nothing to send and context=1", remedy)
        if self.sequence_parallel and self.tensor == 1:
            remedy = "set tensor above 1 or remove sequence_parallel"
            yield self.problem("sequence_parallel", "shards over tensor ranks and tensor=1", remedy)
