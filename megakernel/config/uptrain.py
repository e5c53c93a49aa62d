"""The uptrain section: the stages from a dense model to the configured one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .errors import Problem
from .rope import RopeScaling
from .section import Section
from .training import LengthPhase


class KeptLayers(Section):
    """Layers that keep the dense model's attention."""

    keep: list[Annotated[int, Field(ge=0)]] | Annotated[int, Field(ge=0)] = Field(default=[])
    """Layers that stay softmax: a list of indices from 0, or a number of layers: those with the largest transfer
    error."""


class TransferStage(Section):
    """Attention transfer: trains only the attention mechanisms' own weights, to match the teacher layer by layer."""

    steps: int = Field(gt=0)
    """Optimizer steps."""

    lr: float = Field(default=1e-2, gt=0)
    """Peak learning rate."""

    rows: int = Field(default=0, ge=0)
    """Sampled queries per sequence whose attention weights are compared too; 0: compare outputs only."""

    cross_entropy: float = Field(default=0.0, ge=0)
    """Weight of the cross entropy of sampled attention rows; 0: only measure it, and train on outputs alone."""

    block_layers: int | None = Field(default=None, gt=0)
    """Layers per block; blocks are trained one after the other, with only one in memory. None: all layers at once. Set
    it if the teacher does not fit."""

    def problems(self) -> Iterator[Problem]:
        """A weight of rows that are not sampled."""
        if self.cross_entropy and not self.rows:
            yield self.problem(
                "cross_entropy", "weighs sampled rows and rows=0", "set rows, such as 64, or remove it"
            )


class DistillStage(Section):
    """Loss of the main stage; its steps and learning rates are those of training and optimizer."""

    kl: float = Field(default=1.0, ge=0)
    """Weight of KL(teacher ‖ model) over the vocabulary; 0: train without a teacher."""

    cross_entropy: float = Field(default=1.0, ge=0)
    """Weight of the labels' cross entropy."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of teacher and model; KL is multiplied by its square."""

    teacher: Path | None = None
    """Run, checkpoint or dense model to learn from, of any size but the same vocabulary; None: init.from."""

    def problems(self) -> Iterator[Problem]:
        """Keys without effect if there is no teacher."""
        if self.kl == 0 and self.teacher is not None:
            yield self.problem("teacher", "has no effect beside kl=0", "remove it, or set kl above 0")
        if self.kl == 0 and self.cross_entropy != 1:
            reason = "weighs the only term of the loss if kl=0"
            yield self.problem("cross_entropy", reason, "set 1, or kl above 0")


class LengthStage(Section):
    """Length stage: cross entropy on longer sequences."""

    steps: int = Field(gt=0)
    """Optimizer steps."""

    seq_len: int = Field(gt=0, le=1_000_000_000)
    """Tokens per sample; with a seq_len_schedule, of the last phase."""

    seq_len_schedule: list[LengthPhase] = Field(default=[])
    """Phases of shorter samples that precede it, as in training."""

    global_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per optimizer step; None: training.global_batch_size."""

    rope_scaling: RopeScaling | None = None
    """Replaces model.rope_scaling as a whole; None: keep that."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate; mechanism_lr is scaled by the same ratio. None: those of optimizer."""


class Uptrain(Section):
    """Stages of up-training, from the dense model of init.from to the configured model."""

    layers: KeptLayers = KeptLayers()
    """Layers that stay softmax, for a hybrid model."""

    transfer: TransferStage | None = None
    """Attention transfer before the main stage; None: none."""

    alpha: float = Field(default=0.0, ge=0, lt=1)
    """Share of training.steps that first trains `base`, from whose weights FLuRKA then starts; 0: no base stage."""

    base: Literal["kernel", "low_rank"] = "kernel"
    """Base stage: FLuRKA's `kernel` without compression, or its compression (`low_rank`) with softmax. Encoders'
    FLuRKAs then start with its weights, and new ones of the other half."""

    anneal: float = Field(default=0.3, ge=0, lt=1)
    """Share of training.steps after a kernel base over which the rank is halved step by step, from
    block_size to the configured one; without a near window there is no such stage."""

    near_dropout: float = Field(default=0.0, ge=0, le=1)
    """Initial probability of training.near_dropout in the first stage with gates that trains all weights."""

    distill: DistillStage = DistillStage()
    """Loss of the main stage, which has training.steps steps together with `base` and `anneal`."""

    length: LengthStage | None = None
    """Longer sequences after the main stage; None: none."""

    from_scratch: bool = False
    """For comparison, also train the configured model from random weights on as many tokens."""

    scratch_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of from_scratch for all weights; None: lr and mechanism_lr of optimizer."""

    train_dense: bool = False
    """For comparison, also continue training the dense model on as many tokens."""

    def problems(self) -> Iterator[Problem]:
        """A number of kept layers without transfer errors."""
        if isinstance(self.layers.keep, int) and self.layers.keep > 0 and self.transfer is None:
            remedy = "add transfer: {steps: 100}, or write the layers' numbers"
            yield self.problem("layers.keep", "chooses by transfer error and transfer is null", remedy)

    @property
    def annealed(self) -> float:
        """Share of training.steps with a rank above the configured one."""
        return self.anneal if self.alpha > 0 and self.base == "kernel" else 0.0
