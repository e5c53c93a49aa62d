"""The sections of a training run: optimizer, schedule, training with its phases, checkpoint and logging."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from .errors import Problem, nearest_multiples
from .model import Model
from .rope import RopeScaling
from .section import Section

Recompute = Literal["none", "selective", "full"]


class Lora(Section):
    """Low-rank updates W + alpha/rank B A of a layer's matrices, whose W stay as they are."""

    rank: int = Field(default=8, gt=0, le=100_000)
    """Rows of A."""

    alpha: float = Field(default=16.0, gt=0)
    """Updates are multiplied by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an update's inputs that training sets to 0; drawn anew on another layout."""

    targets: Annotated[
        list[Literal["query", "key", "value", "output", "gate", "up", "down"]], Field(min_length=1)
    ] = Field(default=["output", "value"])
    """Matrices that are updated: the projections to and behind the heads, and those of the MLP."""

    mechanism: bool = True
    """Train what attention mechanisms own, too."""


class Optimizer(Section):
    """AdamW; norms, biases and kernel parameters (gates, masses, feature maps) are not decayed."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""

    mechanism_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of what attention mechanisms own (feature maps, E, F, gates, masses); None takes lr."""

    trained: Literal["all", "mechanism", "lora"] = "all"
    """Weights that are updated: all, what attention mechanisms own, or that and low-rank updates (`lora`)."""

    lora: Lora | None = None
    """Low-rank updates of trained: lora; None takes their defaults."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay."""

    clip_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Gradients are scaled down to this global norm; .inf never scales."""

    @property
    def updates(self) -> Lora | None:
        """The low-rank updates that the model has; None for trained: all and mechanism."""
        return (self.lora or Lora()) if self.trained == "lora" else None

    def problems(self) -> Iterator[Problem]:
        """Updates that nothing trains."""
        yield from self.without_effect("trained", {"lora": ("lora",)})


class Schedule(Section):
    """Learning rate over steps: linear warmup, then the named decay down to min_lr_ratio x peak.

    A run that is shorter than its warmup or decay is the beginning of the schedule.
    """

    name: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = "cosine"
    """Decay; `wsd` is warmup, stable, then a linear decay over the last decay_steps."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps from 0 to the peak."""

    decay_steps: int | None = Field(default=None, gt=0)
    """Length of the decay; None: the rest of training (cosine, linear) or a tenth of training (wsd)."""

    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a share of the peak."""

    steps_before: int = Field(default=0, ge=0)
    """Steps of the same schedule that are already made, by the run that this one continues."""

    steps_after: int = Field(default=0, ge=0)
    """Steps of the same schedule that a run behind this one will make."""

    def problems(self) -> Iterator[Problem]:
        """A length for a decay that has none."""
        yield from self.without_effect("name", {"decay_steps": ("cosine", "linear", "wsd")})


class NearDropout(Section):
    """Near windows that are shut for some heads at some steps, so that their far part learns to do without."""

    start: float = Field(gt=0, le=1)
    """Probability with which a head's window is shut in the first step; it falls linearly."""

    steps: int = Field(gt=0)
    """Step from which on no window is shut."""

    def probability(self, step: int) -> float:
        """That of a step, counted from 0."""
        return self.start * max(0.0, 1 - step / self.steps)


class Profile(Section):
    """Steps that PyTorch's profiler records, operation by operation."""

    start: int = Field(default=10, gt=0)
    """First step that is recorded, counted from 1; the first steps of a start compile and connect."""

    steps: int = Field(default=3, gt=0)
    """Steps that are recorded."""


_OF_PHASE = {"seq_len", "global_batch_size", "micro_batch_size"}


class LengthPhase(Section):
    """A phase before the last. What it does not say is as in the last, which training and model describe."""

    until_step: int = Field(gt=0)
    """Steps of the whole run after which the next phase begins."""

    seq_len: int = Field(gt=0, le=1_000_000_000)
    """Tokens per sample; at most that of the next phase."""

    global_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per optimizer step; None takes training.global_batch_size."""

    micro_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per forward pass of one data-parallel rank; None takes training.micro_batch_size."""

    rope_base: float | None = Field(default=None, gt=1)
    """Base of the rotary frequencies; None takes model.rope_base."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; None takes model.rope_scaling, {kind: none} has none."""


@dataclass(frozen=True)
class Phase:
    """Steps [first_step, end_step) of a run, which read sequences of one length."""

    key: str
    """Where it is written: `training`, or `training.seq_len_schedule.0`."""

    first_step: int
    end_step: int

    first_sample: int
    """Samples that the run consumes before it."""

    stream_start: int
    """Samples that the run consumes before its first phase of this length: those read another stream."""

    stream_end: int | None
    """Samples that it consumes up to its last phase of this length; None for the last length, which has no end."""

    training: "Training"
    """The training section while the phase lasts; it has no schedule."""

    written: LengthPhase | None
    """What the schedule says of it; None for the last phase."""

    def model(self, model: Model) -> Model:
        """The model with the rotary frequencies of this phase."""
        own = {"rope_base": None, "rope_scaling": None} if self.written is None else dict(self.written)
        changes = {key: own[key] for key in ("rope_base", "rope_scaling") if own[key] is not None}
        return model.model_copy(update=changes)

    def samples_before(self, step: int) -> int:
        """Samples that the run has consumed when `step` of this phase begins."""
        return self.first_sample + (step - self.first_step) * self.training.global_batch_size


class Training(Section):
    """The training loop."""

    steps: int = Field(gt=0)
    """Optimizer steps of the whole run."""

    seq_len: int = Field(gt=0, le=1_000_000_000)
    """Tokens per sample; of the last and longest phase, where there is a seq_len_schedule."""

    seq_len_schedule: list[LengthPhase] = Field(default=[])
    """Phases of shorter samples before those of seq_len, in order."""

    global_batch_size: int = Field(gt=0, le=10_000_000)
    """Samples per optimizer step over all processes."""

    micro_batch_size: int = Field(default=1, gt=0, le=10_000_000)
    """Samples per forward pass of one data-parallel rank; the rest of the batch is accumulated."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type; bfloat16 keeps float32 master weights."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes CUDA when there is a device."""

    log_every: int = Field(default=10, gt=0)
    """Steps between two metric lines."""

    eval_every: int | None = Field(default=None, gt=0)
    """Steps between two evaluations; None evaluates at the end only."""

    eval_samples: int = Field(default=64, ge=0)
    """Validation samples per evaluation, the same ones each time; 0 never evaluates."""

    eval_seq_len: int | None = Field(default=None, gt=0)
    """Tokens per validation sample, in every phase; None takes seq_len."""

    activation_checkpointing: Recompute = "none"
    """Recompute in backward: nothing, the attention core, or whole layers."""

    checkpoint_offload: bool = False
    """Keep what a recomputed layer starts from in host memory; takes activation_checkpointing: full."""

    mlp_chunk_size: int | None = Field(default=None, gt=0)
    """Tokens whose inner MLP activations exist at once, recomputed in backward; None keeps all of them."""

    near_dropout: NearDropout | None = None
    """Shut near windows of FLuRKA layers at random; null never does."""

    loss_chunk_size: int = Field(default=4096, gt=0)
    """Tokens whose logits exist at once."""

    skip_samples: list[tuple[int, int]] = Field(default=[])
    """Ranges [first, end) of training samples, in consumption order over all phases, that are passed over."""

    max_skipped_steps: int = Field(default=10, gt=0)
    """Steps in a row with a non-finite loss or gradient after which training stops."""

    profile: Profile | None = None
    """Record steps of every process into RUN/profile: a trace, and on CUDA what memory holds; null records none."""

    @property
    def phases(self) -> list[Phase]:
        """Which steps read sequences of which length, in order; one phase where there is no schedule.

        The last lasts as long as training does, however many steps that are.
        """
        phases: list[Phase] = []
        written: Sequence[LengthPhase | None] = [*self.seq_len_schedule, None]
        for index, entry in enumerate(written):
            before = phases[-1] if phases else None
            changes = {} if entry is None else entry.model_dump(exclude_none=True, include=_OF_PHASE)
            now = self.model_copy(update={**changes, "seq_len_schedule": []})
            first = 0 if before is None else before.end_step
            consumed = 0 if before is None else before.samples_before(first)
            continues = before is not None and before.training.seq_len == now.seq_len
            phases.append(
                Phase(
                    key="training" if entry is None else f"training.seq_len_schedule.{index}",
                    first_step=first,
                    end_step=max(self.steps, first) if entry is None else entry.until_step,
                    first_sample=consumed,
                    stream_start=before.stream_start if before is not None and continues else consumed,
                    stream_end=None,
                    training=now,
                    written=entry,
                )
            )
        ends: dict[int, int | None] = {
            phase.stream_start: phase.samples_before(phase.end_step) for phase in phases
        }
        ends[phases[-1].stream_start] = None
        return [replace(phase, stream_end=ends[phase.stream_start]) for phase in phases]

    @property
    def evaluation_len(self) -> int:
        """Tokens per validation sample."""
        return self.eval_seq_len or self.seq_len

    def phase_of(self, step: int) -> Phase:
        """The phase in which `step`, counted from 0, is trained; after the last step, the last phase reached."""
        return next((phase for phase in self.phases if step < phase.end_step), self.phases[-1])

    def phase_behind(self, steps: int) -> Phase:
        """The phase of the last of `steps` steps done: that whose frequencies the weights were trained with."""
        return self.phase_of(max(steps - 1, 0))

    def consumed(self, steps: int) -> tuple[int, int]:
        """Samples, and tokens of their sequences, that the first `steps` steps read."""
        samples = tokens = 0
        for phase in self.phases:
            inside = min(max(steps - phase.first_step, 0), phase.end_step - phase.first_step)
            samples += inside * phase.training.global_batch_size
            tokens += inside * phase.training.global_batch_size * phase.training.seq_len
        return samples, tokens

    def problems(self) -> Iterator[Problem]:
        """Batches that do not divide, lengths that shrink, and ranges that are none."""
        yield from _phase_problems(self)
        if self.checkpoint_offload and self.activation_checkpointing != "full":
            reason = f"has nothing to move with activation_checkpointing={self.activation_checkpointing}"
            yield self.problem(
                "checkpoint_offload", reason, "set activation_checkpointing to full or remove it"
            )
        for first, end in self.skip_samples:
            if not 0 <= first < end:
                yield Problem(
                    "skip_samples", [first, end], "is no range", "write [first, end] with 0 <= first < end"
                )


def _phase_problems(training: Training) -> Iterator[Problem]:
    before, longest = 0, 0
    for phase in training.phases:
        key, now = phase.key.partition("training")[2].lstrip("."), phase.training
        prefix = f"{key}." if key else ""
        if now.global_batch_size % now.micro_batch_size:
            reason = f"is not a multiple of micro_batch_size={now.micro_batch_size}"
            choice = nearest_multiples(now.global_batch_size, now.micro_batch_size)
            yield Problem(f"{prefix}global_batch_size", now.global_batch_size, reason, f"set {choice}")
        if phase.written is not None and phase.written.until_step <= before:
            reason = f"does not come after the phase before it, which ends with step {before}"
            yield Problem(f"{prefix}until_step", phase.written.until_step, reason, f"set more than {before}")
        if now.seq_len < longest:
            reason = f"is shorter than the phase before it ({longest} tokens)"
            yield Problem(f"{prefix}seq_len", now.seq_len, reason, f"set at least {longest}")
        before, longest = max(before, phase.end_step), max(longest, now.seq_len)
    if training.evaluation_len > training.seq_len:
        reason = f"exceeds seq_len={training.seq_len}"
        remedy = "set at most seq_len; `megakernel evaluate --seq-len` measures longer samples"
        yield Problem("eval_seq_len", training.eval_seq_len, reason, remedy)


class Checkpoint(Section):
    """When checkpoints are written and which are kept."""

    every: int = Field(default=1000, gt=0)
    """Steps between two checkpoints; the last step is always saved."""

    keep: int = Field(default=2, gt=0)
    """Newest checkpoints that are kept."""

    keep_every: int | None = Field(default=None, gt=0)
    """Checkpoints at multiples of this step are kept for good."""

    def problems(self) -> Iterator[Problem]:
        """A checkpoint that is kept for good has to be written first."""
        if self.keep_every is not None and self.keep_every % self.every:
            reason = f"is not a multiple of every={self.every}"
            yield self.problem("keep_every", reason, f"set {nearest_multiples(self.keep_every, self.every)}")


class Logging(Section):
    """What is written while training."""

    tensorboard: bool = True
    """Write RUN/tensorboard."""

    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak TFLOP/s of one device, for throughput/mfu; None takes it from a table of known GPUs."""

    histograms_every: int | None = Field(default=None, gt=0)
    """Steps between two histograms of every weight, gradient and gate; null writes none."""

    analysis_every: int | None = Field(default=None, gt=0)
    """Steps between two plots of what attention layers do; null draws none."""

    sample_prompt: str | None = None
    """Text that the model continues at each evaluation, '' for a new document; null writes no samples."""

    sample_tokens: int = Field(default=200, gt=0)
    """Most tokens of a sample."""

    def problems(self) -> Iterator[Problem]:
        """What is to be written where nothing is written."""
        if self.tensorboard:
            return
        for key in ("histograms_every", "analysis_every", "sample_prompt"):
            if (value := getattr(self, key)) is not None:
                reason = "goes to TensorBoard alone, and logging.tensorboard is false"
                yield Problem(key, value, reason, "remove it or set tensorboard: true")
