"""The uptrain section: how a dense model becomes the configured one, stage by stage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .errors import Problem
from .rope import RopeScaling
from .section import Section
from .training import LengthPhase


class KeptLayers(Section):
    """Which layers stay as the dense model has them."""

    keep: list[Annotated[int, Field(ge=0)]] | Annotated[int, Field(ge=0)] = Field(default=[])
    """Layers that stay softmax: their numbers, or how many; then those with the largest transfer error."""


class TransferStage(Section):
    """Attention transfer: all weights stay but those of attention mechanisms."""

    steps: int = Field(gt=0)
    """Optimizer steps."""

    lr: float = Field(default=1e-2, gt=0)
    """Peak learning rate."""

    rows: int = Field(default=0, ge=0)
    """Sampled queries of each sequence whose weights are compared with the teacher's; 0: outputs alone."""

    cross_entropy: float = Field(default=0.0, ge=0)
    """Weight of the cross entropy of the sampled queries' weights; 0 measures them and learns from outputs alone."""

    block_layers: int | None = Field(default=None, gt=0)
    """Layers of the teacher in memory at a time: one block after the other learns; null takes all layers at once."""


class DistillStage(Section):
    """What the main stage lowers; its steps and learning rates are those of training and optimizer."""

    kl: float = Field(default=1.0, ge=0)
    """Weight of KL(teacher || model) over the vocabulary; 0 needs no teacher."""

    cross_entropy: float = Field(default=1.0, ge=0)
    """Weight of the cross entropy of the labels."""

    temperature: float = Field(default=1.0, gt=0)
    """Both sides' logits are divided by it."""

    teacher: Path | None = None
    """Run, checkpoint or dense model of the same vocabulary to learn from, of whatever sizes; null takes init.from."""

    def problems(self) -> Iterator[Problem]:
        """Without a teacher the labels are all there is."""
        if self.kl == 0 and self.teacher is not None:
            yield self.problem("teacher", "has no effect beside kl=0", "remove it, or set kl above 0")
        if self.kl == 0 and self.cross_entropy != 1:
            reason = "weighs the labels, and beside kl=0 there is nothing to weigh them against"
            yield self.problem("cross_entropy", reason, "set 1, or kl above 0")


class LengthStage(Section):
    """Cross entropy on longer sequences."""

    steps: int = Field(gt=0)
    """Optimizer steps."""

    seq_len: int = Field(gt=0, le=1_000_000_000)
    """Tokens per sample, of the last phase."""

    seq_len_schedule: list[LengthPhase] = Field(default=[])
    """Phases of shorter samples before, as in training."""

    global_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per optimizer step; None takes training.global_batch_size."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, in place of all of model.rope_scaling; None takes that."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate, mechanism_lr changing in the same ratio; None takes those of optimizer."""


class Uptrain(Section):
    """Stages between the dense model of init.from and the model that the configuration describes."""

    layers: KeptLayers = KeptLayers()
    """Hybrids: layers that stay softmax."""

    transfer: TransferStage | None = None
    """Attention transfer before the main stage; null leaves it out."""

    alpha: float = Field(default=0.0, ge=0, lt=1)
    """Share of training.steps that trains `base` before FLuRKA starts from its weights."""

    base: Literal["kernel", "low_rank"] = "kernel"
    """Half of FLuRKA that is trained first: the kernel without compression, or compression with softmax."""

    anneal: float = Field(default=0.3, ge=0, lt=1)
    """Share of training.steps, behind a kernel base, over which the rank is halved from block_size to its own."""

    near_dropout: float = Field(default=0.0, ge=0, le=1)
    """Probability with which near windows are shut at first, in the first stage with gates that trains all weights."""

    distill: DistillStage = DistillStage()
    """The main stage, training.steps long with that of `base`."""

    length: LengthStage | None = None
    """Growing sequences after the main stage; null leaves it out."""

    from_scratch: bool = False
    """Also train the configured model from drawn weights on as many tokens, for comparison."""

    scratch_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of from_scratch for all weights, mechanisms' too; None takes both rates of optimizer."""

    train_dense: bool = False
    """Also train the dense model on, on as many tokens, for comparison: what the text alone is worth."""

    def problems(self) -> Iterator[Problem]:
        """A number of layers to keep needs errors to choose by."""
        if isinstance(self.layers.keep, int) and self.layers.keep > 0 and self.transfer is None:
            remedy = "add transfer: {steps: 100}, or write the layers' numbers"
            yield self.problem("layers.keep", "chooses by transfer error and transfer is null", remedy)
        if self.alpha + self.annealed >= 1:
            reason = f"and anneal={self.anneal:g} leave nothing of training.steps to the configured model"
            yield self.problem("alpha", reason, "set shares that add up to less than 1")

    @property
    def annealed(self) -> float:
        """Share of training.steps with a rank between block_size and the configured one."""
        return self.anneal if self.alpha > 0 and self.base == "kernel" else 0.0
