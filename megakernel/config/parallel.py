"""The parallel section: how training is partitioned over processes."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from .errors import Problem
from .section import Section

SoftmaxExchange = Literal["auto", "heads", "ring"]

_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Gradients of a bucket, at least and per rank, as in Megatron-core: over more ranks small messages take longer."""


def reduce_bucket(gradients: int, ranks: int) -> int:
    """Size of ZeRO's reduce bucket, in gradients: a rank has that many, which are reduced over `ranks`.

    DeepSpeed's default, 500 million, is all gradients of most models, so that none is reduced before backward ends.
    """
    return min(gradients, max(_BUCKET, _BUCKET_PER_RANK * ranks))


def overlaps_reduction(zero_stage: int, stages: int) -> bool:
    """Whether DeepSpeed reduces a bucket on a stream of its own while backward fills a second one.

    Its default is that ZeRO 3 does. Pipelines cannot.
    """
    return zero_stage == 3 or (zero_stage in (1, 2) and stages == 1)


class Parallel(Section):
    """World size = tensor x context x data x pipeline, tensor ranks adjacent; data parallelism takes what is left."""

    tensor: int = Field(default=1, gt=0, le=1_000_000)
    """Tensor parallelism: ranks that split each layer's heads and MLP, a divisor of num_heads. A divisor or a multiple
    of num_kv_heads: in a multiple, neighbouring ranks hold the same key head. Keep it within a node."""

    sequence_parallel: bool = False
    """Megatron sequence parallelism: split norms and residuals over the tensor ranks, to save activation memory."""

    context: int = Field(default=1, gt=0, le=1_000_000)
    """Context parallelism: ranks that each hold a contiguous shard of the same sequences; for long sequences."""

    state_exchange: Literal["auto", "gather", "ring"] = "auto"
    """How context ranks exchange the states of kernel attention: all-`gather`, or a `ring` of partial sums."""

    softmax_exchange: SoftmaxExchange = "auto"
    """Context parallelism of softmax: `heads` (Ulysses all-to-all) or `ring` attention; `auto`: of a sliding window the
    tokens that it needs, if all are in the shard before; else heads if they divide evenly, else ring."""

    pipeline: int = Field(default=1, gt=0, le=1_000_000)
    """Pipeline parallelism: stages that split the layers."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO, which shards: 0 nothing (float32 only), 1 optimizer state, 2 also gradients, 3 also weights."""

    timeout_minutes: float = Field(default=10.0, gt=0, le=1_000_000)
    """Minutes after which a hanging collective ends the job, or a first step (which compiles) without progress."""

    stall_minutes: float = Field(default=5.0, gt=0, le=1_000_000)
    """Minutes after which a later step without progress ends the job, on GPUs at least twice the last step's time; the
    log names the rank that others wait for."""

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model: tensor x context x pipeline."""
        return self.tensor * self.context * self.pipeline

    def problems(self) -> Iterator[Problem]:
        """Unsupported combinations, and keys without effect."""
        if self.pipeline > 1 and self.zero_stage > 1:
            reason = (
                f"with pipeline={self.pipeline} is beyond DeepSpeed's pipeline engine, which supports 0 and 1"
            )
            yield self.problem("zero_stage", reason, "set zero_stage to 1 or pipeline to 1")
        for key in ("state_exchange", "softmax_exchange"):
            if self.context == 1 and self.is_set(key):
                remedy = "remove it or set context above 1"
                yield self.problem(key, "has no effect with context=1", remedy)
        if self.sequence_parallel and self.tensor == 1:
            remedy = "set tensor above 1 or remove sequence_parallel"
            yield self.problem("sequence_parallel", "has no effect with tensor=1", remedy)
