"""Sections of a training run: optimizer, schedule, training with its phases, checkpoint, logging."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .errors import ConfigError, Problem, nearest_multiples
from .model import Model
from .notify import Notify
from .rope import RopeScaling
from .section import Section

Recompute = Literal["none", "selective", "full"]


class Lora(Section):
    """LoRA: low-rank updates W + alpha/rank B A of a layer's matrices, whose W are frozen."""

    rank: int = Field(default=8, gt=0, le=100_000)
    """Rank of an update: rows of A."""

    alpha: float = Field(default=16.0, gt=0)
    """Updates are multiplied by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability with which training sets an update's inputs to 0; the draws depend on the layout."""

    targets: Annotated[
        list[Literal["query", "key", "value", "output", "gate", "up", "down"]], Field(min_length=1)
    ] = Field(default=["output", "value"])
    """Matrices that get updates: projections of attention (query to output) and of the MLP (gate, up, down)."""

    mechanism: bool = True
    """Also train the attention mechanisms' own weights (feature maps, E, F, gates, far_mass)."""


class Optimizer(Section):
    """AdamW, or Muon. Norms, biases and mechanism weights (gates, far_mass, feature maps) get no weight decay."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the projections of attention and MLP in the blocks, AdamW for all other weights."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""

    muon_lr: float | None = Field(default=None, gt=0)
    """muon: peak learning rate of its matrices, whose updates are scaled to the size of AdamW's; None: lr."""

    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon: decay of its momentum, which is Nesterov's."""

    mechanism_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the attention mechanisms' own weights (feature maps, E, F, gates, far_mass); None: lr."""

    trained: Literal["all", "mechanism", "lora"] = "all"
    """Weights to train: `all`, only the attention mechanisms' own (`mechanism`), or these and LoRA updates (`lora`)."""

    lora: Lora | None = None
    """LoRA settings for trained: lora; None: the defaults below."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay."""

    decay_embeddings: bool = True
    """Whether weight decay includes the embeddings of tokens and positions; tied ones are also the head."""

    clip_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Largest global gradient norm; larger gradients are scaled down to it. `.inf`: no clipping."""

    @property
    def updates(self) -> Lora | None:
        """LoRA settings of trained: lora; else None."""
        return (self.lora or Lora()) if self.trained == "lora" else None

    def problems(self) -> Iterator[Problem]:
        """Settings of LoRA or Muon without effect, and Muon for weights that are no whole matrices."""
        yield from self.without_effect("trained", {"lora": ("lora",)})
        yield from self.without_effect("name", {"muon_lr": ("muon",), "muon_momentum": ("muon",)})
        if self.name == "muon" and self.trained != "all":
            reason = f"is for whole matrices, and trained: {self.trained} trains none"
            yield self.problem("name", reason, "set adamw, or trained: all")


class SchedulePart(Section):
    """Which part of a schedule a run is; `uptrain` sets it for its stages."""

    is_internal = True

    steps_before: int = Field(default=0, ge=0)
    """Steps of the schedule already taken by the run whose weights this one starts from."""

    steps_after: int = Field(default=0, ge=0)
    """Steps of the schedule left for a run that will start from this one."""


class Schedule(Section):
    """Learning rate over steps: linear warmup, then a decay to min_lr_ratio x peak.

    A run that is shorter than its warmup or decay ends within them.
    """

    name: Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"] = "cosine"
    """Decay; `wsd` is warmup, stable, then a linear decay over the last decay_steps."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup from 0 to the peak."""

    decay_steps: int | None = Field(default=None, gt=0)
    """Steps of the decay; None: the rest of training (cosine, linear) or a tenth of training (wsd)."""

    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate / peak."""

    part: SchedulePart = SchedulePart()
    """The run's part of a schedule that several runs share."""

    moved = (("steps_before", "part"), ("steps_after", "part"))

    def problems(self) -> Iterator[Problem]:
        """A decay length without a decay."""
        yield from self.without_effect("name", {"decay_steps": ("cosine", "linear", "wsd")})


class NearDropout(Section):
    """Dropout of whole near windows of gated heads, so that the far context learns to work without them."""

    start: float = Field(gt=0, le=1)
    """Probability that a head's window is dropped in the first step; it falls linearly to 0."""

    steps: int = Field(gt=0)
    """Steps until no window is dropped any more."""

    def probability(self, step: int) -> float:
        """Drop probability of a step, counted from 0."""
        return self.start * max(0.0, 1 - step / self.steps)


class Profile(Section):
    """Steps to record with PyTorch's profiler."""

    start: int = Field(default=10, gt=0)
    """First recorded step, counted from 1; the first few compile kernels and connect ranks."""

    steps: int = Field(default=3, gt=0)
    """Steps to record."""


_PHASE_KEYS = {"seq_len", "global_batch_size", "micro_batch_size"}


class LengthPhase(Section):
    """A phase of shorter samples before the last; keys it does not set are those of training and model."""

    until_step: int = Field(gt=0)
    """Steps of the whole run after which the next phase begins."""

    seq_len: int = Field(gt=0, le=1_000_000_000)
    """Tokens per sample; at most that of the next phase."""

    global_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per optimizer step; None: training.global_batch_size."""

    micro_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per forward pass of one data-parallel rank; None: training.micro_batch_size."""

    rope_base: float | None = Field(default=None, gt=1)
    """Base of the rotary frequencies; None: model.rope_base."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; None: model.rope_scaling; {kind: none}: no scaling."""


@dataclass(frozen=True)
class Phase:
    """Steps [first_step, end_step) of a run, with sequences of one length."""

    key: str
    """Key that configures it: `training`, or `training.seq_len_schedule.0`."""

    first_step: int
    end_step: int

    first_sample: int
    """Samples that the run consumes before this phase."""

    stream_start: int
    """Samples consumed before the first phase of this length: sequences of each length are a stream of their own."""

    stream_end: int | None
    """Samples consumed by the end of the last phase of this length; None for the last length, which has no end."""

    training: "Training"
    """The training section during this phase, without a schedule."""

    schedule_entry: LengthPhase | None
    """Its entry in the schedule; None for the last phase."""

    def model(self, model: Model) -> Model:
        """The model section with the rotary frequencies of this phase."""
        keys = {key: getattr(self.schedule_entry, key, None) for key in ("rope_base", "rope_scaling")}
        return model.model_copy(update={key: value for key, value in keys.items() if value is not None})

    def samples_before(self, step: int) -> int:
        """Samples that the run consumes before `step` of this phase."""
        return self.first_sample + (step - self.first_step) * self.training.global_batch_size


class Training(Section):
    """The training loop."""

    steps: int = Field(gt=0)
    """Optimizer steps of the whole run. Raise it to continue a finished run."""

    tokens: int | None = Field(default=None, gt=0)
    """Tokens of the whole run in place of steps: as many steps as read at least these, global_batch_size x seq_len in
    each, are computed and recorded."""

    epochs: float | None = Field(default=None, gt=0, le=1_000_000)
    """Passes over the corpora in place of steps: the steps of so many samples as data.train has, rounded up, are
    computed when the configuration is loaded, and recorded."""

    seq_len: int = Field(gt=0, le=1_000_000_000)
    """Tokens per sample; with a seq_len_schedule, of the last and longest phase."""

    seq_len_schedule: list[LengthPhase] = Field(default=[])
    """Phases of shorter samples that precede those of seq_len, in order."""

    global_batch_size: int = Field(gt=0, le=10_000_000)
    """Samples per optimizer step, over all ranks."""

    micro_batch_size: int = Field(default=1, gt=0, le=10_000_000)
    """Samples per forward pass of one data-parallel rank; gradients accumulate over micro-batches. Lower it if memory
    runs out."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype; bfloat16 keeps float32 master weights."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; `auto`: CUDA if there is a GPU."""

    log_every: int = Field(default=10, gt=0)
    """Steps between logged metrics."""

    eval_every: int | None = Field(default=None, gt=0)
    """Steps between evaluations; None: evaluate only at the end."""

    eval_samples: int = Field(default=64, ge=0)
    """Validation samples per evaluation, the same ones each time; 0: no evaluation."""

    eval_sources: bool = False
    """Also evaluate the validation samples of each of several corpora by themselves, which doubles an evaluation's
    time."""

    eval_seq_len: int | None = Field(default=None, gt=0)
    """Tokens per validation sample, in every phase; None: seq_len."""

    activation_checkpointing: Recompute = "none"
    """Recompute in backward nothing, the attention core (`selective`) or whole layers (`full`), to save memory."""

    compile: Literal["none", "layer"] = "none"
    """torch.compile of nothing, or of each transformer layer's body (`layer`), in training and its evaluations; the
    first step of every sequence length then takes minutes. docs/optimization.md, "Compiled layers"."""

    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Multiply the layers' matrices as float8 numbers, scaled by tensor or by row, in training steps; the rest stays
    bfloat16. For wide layers on GPUs from Ada and Hopper on. docs/optimization.md, "Float8"."""

    checkpoint_offload: bool = False
    """Keep the inputs of recomputed layers in host memory; needs activation_checkpointing: full."""

    mlp_chunk_size: int | None = Field(default=None, gt=0)
    """Tokens per chunk of the MLP, whose inner activations are recomputed in backward; None: no chunks. Saves memory
    for long sequences."""

    near_dropout: NearDropout | None = None
    """Randomly drop near windows of gated FLuRKA layers; None: never."""

    loss_chunk_size: int = Field(default=4096, gt=0)
    """Tokens per chunk of the loss; only one chunk's logits exist at a time."""

    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the mean of logsumexp(logits)^2 over the tokens that count, which keeps logits small; it is not
    part of the logged loss. Often 1e-4; 0: none."""

    skip_samples: list[tuple[int, int]] = Field(default=[])
    """Ranges [first, end) of training samples to skip, in consumption order over all phases, such as those that
    made the loss diverge."""

    max_skipped_steps: int = Field(default=10, gt=0)
    """Consecutive steps with a non-finite loss or gradient (their updates are skipped) after which training stops."""

    profile: Profile | None = None
    """Record a trace of some steps of every process, on CUDA also memory, in RUN/profile; None: none."""

    @model_validator(mode="before")
    @classmethod
    def _compute_steps(cls, value: Any) -> Any:
        """The tree with the steps that `tokens` stand for in its place."""
        if isinstance(value, Mapping) and value.get("epochs") is not None and value.get("steps") is None:
            value = {**value, "steps": 1}  # `problems` refuses epochs that `load` has not resolved
        if not isinstance(value, Mapping) or value.get("tokens") is None:
            return value
        if value.get("steps") is not None:
            reason = f"is given beside training.steps={value['steps']}, of which one follows from the other"
            raise ConfigError([Problem("tokens", value["tokens"], reason, "remove it, or set steps: null")])
        tokens = value["tokens"]
        is_count = isinstance(tokens, int | float) and not isinstance(tokens, bool) and 0 < tokens < 2**63
        with suppress(ValueError):  # another key is invalid, and is reported
            plan = cls.model_validate({**value, "steps": 1, "tokens": None})
            if is_count and tokens == int(tokens):
                return {**value, "steps": plan.steps_for(int(tokens)), "tokens": None}
        return {**value, "steps": 1}

    def steps_for(self, tokens: int) -> int:
        """The fewest steps that read at least `tokens`."""
        left = tokens
        for phase in self.phases:
            per_step = phase.training.global_batch_size * phase.training.seq_len
            steps = -(-left // per_step)
            if phase.schedule_entry is None or steps <= phase.end_step - phase.first_step:
                return phase.first_step + steps
            left -= per_step * (phase.end_step - phase.first_step)
        raise AssertionError("the last phase has no end")

    @property
    def phases(self) -> list[Phase]:
        """Phases of the run in order; one without a schedule. The last lasts until training ends."""
        phases: list[Phase] = []
        entries: Sequence[LengthPhase | None] = [*self.seq_len_schedule, None]
        for index, entry in enumerate(entries):
            before = phases[-1] if phases else None
            changes = {} if entry is None else entry.model_dump(exclude_none=True, include=_PHASE_KEYS)
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
                    schedule_entry=entry,
                )
            )
        ends: dict[int, int | None] = {
            phase.stream_start: phase.samples_before(phase.end_step) for phase in phases
        }
        ends[phases[-1].stream_start] = None
        return [replace(phase, stream_end=ends[phase.stream_start]) for phase in phases]

    @property
    def evaluation_len(self) -> int:
        """Tokens per validation sample, with the default resolved."""
        return self.eval_seq_len or self.seq_len

    def phase_of(self, step: int) -> Phase:
        """The phase of `step`, counted from 0; after the last step, the last phase."""
        return next((phase for phase in self.phases if step < phase.end_step), self.phases[-1])

    def last_trained_phase(self, steps: int) -> Phase:
        """The phase of the last of `steps` completed steps, whose rotary frequencies the weights were trained with."""
        return self.phase_of(max(steps - 1, 0))

    def consumed(self, steps: int) -> tuple[int, int]:
        """Samples and tokens that the first `steps` steps read."""
        samples = tokens = 0
        for phase in self.phases:
            count = min(max(steps - phase.first_step, 0), phase.end_step - phase.first_step)
            samples += count * phase.training.global_batch_size
            tokens += count * phase.training.global_batch_size * phase.training.seq_len
        return samples, tokens

    def problems(self) -> Iterator[Problem]:
        """Batches that do not divide, lengths that shrink, and invalid ranges; epochs, which only `load` resolves."""
        yield from _phase_problems(self)
        if self.epochs is not None:
            reason = "stands for steps that only the corpora of a configuration file tell"
            yield self.problem("epochs", reason, "load it from a file, or set steps")
        if self.checkpoint_offload and self.activation_checkpointing != "full":
            reason = f"has no effect with activation_checkpointing={self.activation_checkpointing}"
            yield self.problem(
                "checkpoint_offload", reason, "set activation_checkpointing to full or remove it"
            )
        for first, end in self.skip_samples:
            if not 0 <= first < end:
                yield Problem(
                    "skip_samples", [first, end], "is not a range", "write [first, end] with 0 <= first < end"
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
        if phase.schedule_entry is not None and phase.schedule_entry.until_step <= before:
            reason = f"does not come after the phase before it, which ends with step {before}"
            yield Problem(
                f"{prefix}until_step", phase.schedule_entry.until_step, reason, f"set more than {before}"
            )
        if now.seq_len < longest:
            reason = f"is shorter than the phase before it ({longest} tokens)"
            yield Problem(f"{prefix}seq_len", now.seq_len, reason, f"set at least {longest}")
        before, longest = max(before, phase.end_step), max(longest, now.seq_len)
    if training.evaluation_len > training.seq_len:
        reason = f"exceeds seq_len={training.seq_len}"
        remedy = "set at most seq_len; `megakernel evaluate --seq-len` measures longer samples"
        yield Problem("eval_seq_len", training.eval_seq_len, reason, remedy)


class Checkpoint(Section):
    """When checkpoints are written, and which are kept."""

    every: int = Field(default=1000, gt=0)
    """Steps between checkpoints; the last step is always saved."""

    keep: int = Field(default=2, gt=0)
    """Newest checkpoints to keep; older ones are deleted."""

    keep_every: int | None = Field(default=None, gt=0)
    """Also keep every checkpoint whose step is a multiple of this; None: none."""

    async_save: bool = True
    """Write while training goes on, which waits only for a copy in host memory. The files are the same; if the run is
    killed before they are complete, it continues from the checkpoint before. False: training waits for the files."""

    def problems(self) -> Iterator[Problem]:
        """Checkpoints to keep that are never written."""
        if self.keep_every is not None and self.keep_every % self.every:
            reason = f"is not a multiple of every={self.every}"
            yield self.problem("keep_every", reason, f"set {nearest_multiples(self.keep_every, self.every)}")


_PROJECT = r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$"
"""Names of projects that wandb and trackio both accept."""


class Wandb(Section):
    """Weights & Biases: one run over all restarts, with the scalars, histograms, plots and samples of TensorBoard."""

    project: str = Field(pattern=_PROJECT, max_length=128)
    """Project of the run."""

    entity: str | None = None
    """User or team that owns the project; None: the one that wandb is logged in as."""

    group: str | None = None
    """Group of the run; None: run.name, or that of the up-training whose stage it is."""

    tags: list[str] = Field(default=[])
    """Tags of the run."""

    mode: Literal["online", "offline"] | None = None
    """`offline` writes RUN/wandb only, which `wandb sync RUN/wandb` uploads; None: as WANDB_MODE says, else online."""


class Trackio(Section):
    """Trackio, in a local database or a Space of the Hugging Face hub: one run over all restarts."""

    project: str = Field(pattern=_PROJECT, max_length=128)
    """Project of the run."""

    space: str | None = None
    """Space to write to, such as `user/name`; None: as TRACKIO_SPACE_ID says, else the local database (TRACKIO_DIR)."""

    group: str | None = None
    """Group of the run; None: run.name, or that of the up-training whose stage it is."""


class Logging(Section):
    """Output of training besides the logged metrics."""

    tensorboard: bool = True
    """Write TensorBoard files to the run's folder."""

    wandb: Wandb | None = None
    """Also send what TensorBoard shows to Weights & Biases; None: no."""

    trackio: Trackio | None = None
    """Also send what TensorBoard shows to Trackio; None: no."""

    notify: Notify | None = None
    """Messages when the run ends, fails, restarts, or is stopped to make room; None: no."""

    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak TFLOP/s of one device, for throughput/mfu; None: from a table of known GPUs."""

    histograms_every: int | None = Field(default=None, gt=0)
    """Steps between histograms of every weight, gradient and gate; None: none."""

    analysis_every: int | None = Field(default=None, gt=0)
    """Steps between plots of the attention layers; None: none."""

    sample_prompt: str | None = None
    """Prompt that the model continues at each evaluation; '': an empty document; None: no samples."""

    sample_tokens: int = Field(default=200, gt=0)
    """Longest sample, in tokens."""

    @property
    def trackers(self) -> dict[str, "Wandb | Trackio"]:
        """The experiment trackers that are on, by key, which is also the name of the package."""
        return {key: one for key in ("wandb", "trackio") if (one := getattr(self, key)) is not None}

    def problems(self) -> Iterator[Problem]:
        """Histograms, plots and samples that nothing would show."""
        if self.tensorboard or self.trackers:
            return
        for key in ("histograms_every", "analysis_every", "sample_prompt"):
            if (value := getattr(self, key)) is not None:
                reason = "is written only to TensorBoard, wandb or trackio, and all of them are off"
                yield Problem(key, value, reason, "remove it or set tensorboard: true")
