"""The parallel section: how the world of processes is cut."""

from typing import Literal

from pydantic import Field, model_validator

from .section import Section


class Parallel(Section):
    """World = tensor x context x data x pipeline, tensor fastest; data parallel is what is left of the world."""

    tensor: int = Field(default=1, gt=0)
    """Processes that share each layer's heads and MLP width."""

    sequence_parallel: bool = False
    """Megatron sequence parallelism: norms and residuals are sharded along the sequence over the tensor ranks."""

    context: int = Field(default=1, gt=0)
    """Processes that share one sequence; each holds a contiguous piece."""

    pipeline: int = Field(default=1, gt=0)
    """Pipeline stages."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO: 1 shards optimizer state, 2 also gradients, 3 also weights."""

    timeout_minutes: float = Field(default=10.0, gt=0)
    """A collective that waits longer ends the job."""

    @model_validator(mode="after")
    def _libraries_allow_it(self) -> "Parallel":
        if self.pipeline > 1 and self.zero_stage > 1:
            raise ValueError(
                f"zero_stage={self.zero_stage} with pipeline={self.pipeline}: DeepSpeed's pipeline engine supports "
                "ZeRO 0 and 1 only; set zero_stage to 1 or pipeline to 1"
            )
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("sequence_parallel needs tensor > 1; set tensor or remove sequence_parallel")
        return self
