"""A model under DeepSpeed: what it reads, optimizer steps, evaluation, and the state that a checkpoint holds."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from data_pipeline.batch import Batch
from data_pipeline.order import Share
from megakernel import attention
from megakernel.checkpoint import weights_only
from megakernel.checkpoint.files import record
from megakernel.checkpoint.universal import UniversalFolder, WholeTensors, partitions
from megakernel.checkpoint.universal_load import (
    Comparison,
    compare,
    gathered_shapes,
    load_moments,
    load_weights,
    with_moments,
)
from megakernel.config import Config, Phase
from megakernel.model import ModelSettings, Parted, build_model, rotate_by
from megakernel.model.layer_inputs import LayerInputs, inputs_of
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks

from .deepspeed_config import deepspeed_clips, deepspeed_config, micro_batches_per_step, updates_on_cpu
from .optimizer import SHARE, build_optimizer, freeze, learns
from .schedule import drop_near_windows
from .step_costs import ContextTraffic, MemoryPeaks

MakeModel = Callable[[ModelSettings, Callable[[], float]], Parted]
"""Makes the model of a process, or its stage of one, as `build_model` does."""


def model_inputs(batches: Sequence[Batch], mesh: Mesh) -> list[LayerInputs]:
    """The first layer's input of each micro-batch; all share the number of targets of the whole global batch."""
    own = sum((batch.loss_mask.sum() for batch in batches), start=torch.zeros((), dtype=torch.int64))
    targets = mesh.sum(own.to(mesh.device), mesh.gradient).clamp(min=1).reshape(1)
    return [inputs_of(batch, targets) for batch in batches]


@torch.no_grad()
def means(measure: Callable[..., Tensor], inputs: Sequence[LayerInputs], mesh: Mesh) -> Tensor:
    """The sum over all ranks' inputs of what `measure` makes of each: shares of global means."""
    total = sum(
        (measure(*layer_inputs) for layer_inputs in inputs), start=torch.zeros((), device=mesh.device)
    )
    assert isinstance(total, Tensor)
    return mesh.sum(total, mesh.gradient)


def reading(mesh: Mesh) -> dict[str, Any]:
    """What `TrainingBatches` and `ValidationBatches` are told of this process: its share, and who builds the index."""
    return {
        "share": Share(mesh.dp.rank, mesh.dp.size, mesh.cp.rank, mesh.cp.size),
        "builds_index": mesh.rank == 0,
        "barrier": mesh.barrier,
    }


class DeferredErrors:
    """A DeepSpeed checkpoint engine that remembers a failed write instead of raising it.

    DeepSpeed's save_checkpoint ends in a barrier. A rank that raises before it, on a full disk, would leave
    the others waiting there until the collective times out. Call `raise_first` after save_checkpoint has
    returned.
    """

    def __init__(self, inner: Any):
        self._inner = inner
        self._error: Exception | None = None
        self._written: list[Path] = []

    @classmethod
    def install(cls, engine: Any) -> "DeferredErrors":
        """Make a DeepSpeed engine write through this class; once, after deepspeed.initialize."""
        engine.checkpoint_engine = cls(engine.checkpoint_engine)
        # With ZeRO, rank 0 also copies a conversion script beside the checkpoints, past the checkpoint
        # engine: one more write that can fail, and `megakernel export` does that script's work.
        engine._copy_recovery_script = lambda save_path: None
        return engine.checkpoint_engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file; after a first failure write nothing more."""
        if self._error is not None:
            return
        try:
            self._inner.save(state_dict, path)
            self._written.append(Path(path))
        except Exception as error:
            self._error = error

    def raise_first(self) -> None:
        """Raise the remembered failure, if any, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def take_written(self) -> list[Path]:
        """The files written since the last call."""
        written, self._written = self._written, []
        return written


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step measured, the same on every process."""

    loss: float
    """Mean cross entropy in nats of the global batch, before the update."""

    grad_norm: float
    """Global gradient norm before clipping; inf or nan where it is not finite."""

    skipped: bool
    """The gradients were not finite and the weights were left as they are."""


class Engine:
    """The DeepSpeed engine of one process, sequential or a pipeline stage.

    make_model: makes classes of its own where training lowers more than the labels' cross entropy.

    Raises UserError, alike on all ranks, where optimizer.trained does not suit the layers of every stage.
    """

    def __init__(self, config: Config, settings: ModelSettings, make_model: MakeModel = build_model):
        mesh = settings.mesh
        assert isinstance(mesh, Mesh)
        self.config = config
        self.mesh = mesh
        self.micro_batches = micro_batches_per_step(config.training, mesh)
        self.pipelined = mesh.pp.size > 1
        self._passed_on: tuple[torch.Size, bool] | None = None
        model = Ranks.of(mesh).alike(lambda: self._made(settings, make_model))
        on_cpu = updates_on_cpu(config, mesh)
        optimizer = build_optimizer(model, config.optimizer, mesh, deepspeed_clips(config), on_cpu)
        self.partitions = partitions(model)
        self.record = record(model, self.partitions, optimizer)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config(config, mesh, model),
            mpu=None if self.pipelined else mesh.mpu,
            dist_init_required=False,
        )
        self.write_errors = DeferredErrors.install(self.engine)
        self.memory = MemoryPeaks(mesh.device)
        self.traffic = ContextTraffic(self.engine.module)

    def _made(self, settings: ModelSettings, make_model: MakeModel) -> Parted:
        model = make_model(settings, lambda: self.loss_scale)
        freeze(model, self.config.optimizer.trained, partial(learns, self.config))
        if (dropout := self.config.training.near_dropout) is not None:
            drop_near_windows(model, dropout, self.config.run.seed)
        return model

    @property
    def loss_scale(self) -> float:
        """What DeepSpeed divides by, averaging over micro-batches and over dp x cp.

        Our losses are shares of a global mean and add up.
        """
        return float(self.micro_batches * self.mesh.gradient.size)

    def begin(self, phase: Phase) -> None:
        """Train on sequences and batches of this phase, with its rotary frequencies, from now on; between two steps."""
        training = phase.training
        self.micro_batches = micro_batches_per_step(training, self.mesh)
        # In this order: the second reads the first, and tells a pipeline of its micro-batches.
        self.engine.set_train_micro_batch_size(training.micro_batch_size)
        sequences = training.micro_batch_size * self.micro_batches * self.mesh.gradient.size
        self.engine.set_train_batch_size(sequences)
        # ZeRO remembers the number of its making.
        if hasattr(self.engine.optimizer, "gradient_accumulation_steps"):
            self.engine.optimizer.gradient_accumulation_steps = self.micro_batches
        rotate_by(self.engine.module, phase.model(self.config.model))

    def redraw(self, step: int) -> None:
        """Let the model hold the random numbers that `step`, counted from 0, is trained with."""
        attention.redraw(self.engine.module, step)
        if self.config.optimizer.updates is not None:  # for their dropout, which tensor ranks draw alike
            place = (self.config.run.seed, step, self.mesh.dp.rank, self.mesh.cp.rank)
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        self.engine.module.begin_step(step)

    def train_step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """One update from this rank's micro-batches of a global batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group[SHARE]
        self.engine.train()
        inputs = self._model_inputs(batches)
        skipped_before = self.skipped_steps
        with self.traffic.step():
            loss = self._update(inputs)
        attention.finish_step(self.engine.module, lambda x: self.mesh.sum(x, self.mesh.gradient))
        norm = self.engine.get_global_grad_norm()
        return StepResult(
            loss=loss,
            grad_norm=math.nan if norm is None else float(norm),
            skipped=self.skipped_steps > skipped_before,
        )

    def _update(self, inputs: list[LayerInputs]) -> float:
        if self.pipelined:
            # Forward, backward and update overlap over the stages.
            with self._phase("step"):
                return float(self.engine.train_batch(iter([(one, one[-1]) for one in inputs])))
        total = torch.zeros((), device=self.mesh.device)
        for index, one in enumerate(inputs):
            # DeepSpeed's own count of micro-batches would lose its step where their number changes.
            self.engine.set_gradient_accumulation_boundary(index == len(inputs) - 1)
            with self._phase("forward"):
                loss = self.engine(*one)
            with self._phase("backward"):
                self.engine.backward(loss * self.loss_scale)
            with self._phase("optimizer"):
                self.engine.step()
            total += loss.detach()
        return self.mesh.sum(total, self.mesh.gradient).item()

    @contextmanager
    def before_update(self, look: Callable[[], None]) -> Iterator[None]:
        """Within, `look` is called in each step when the gradients of the whole batch are there and not yet clipped."""
        optimizer = self.engine.optimizer
        update = optimizer.step

        def look_and_update(*args, **options):
            look()
            return update(*args, **options)

        # DeepSpeed's optimizers have no hooks of their own; the engine, with or without stages, calls this one.
        optimizer.step = look_and_update
        try:
            yield
        finally:
            del optimizer.step

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.mesh.progress.reach(name)
        with self.memory.phase(name), record_function(name):
            yield

    def evaluate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """What `Model.measures` names, means over the targets of all ranks' batches; no gradients."""
        self.engine.eval()
        inputs = self._model_inputs(batches)
        names = self.config.model.measures
        found = self._evaluated_by_stages(inputs) if self.pipelined else means(self.engine, inputs, self.mesh)
        return dict(zip(names, found.expand(len(names)).tolist()))

    @torch.no_grad()
    def _evaluated_by_stages(self, inputs: list[LayerInputs]) -> Tensor:
        pairs = iter([(one, one[-1]) for one in inputs])
        # DeepSpeed adds to what the last training step left, and hands a single number from the last stage to the
        # others: a vector it can do neither with.
        self.engine.total_loss = None
        mean = self.engine.eval_batch(pairs, num_micro_batches=len(inputs), bcast_loss=False)
        total = torch.zeros(len(self.config.model.measures), device=self.mesh.device)
        if self.mesh.is_last_stage:
            total += mean * len(inputs) / self.micro_batches
        return self.mesh.sum(total, self.mesh.pp)

    def _model_inputs(self, batches: Sequence[Batch]) -> list[LayerInputs]:
        self._pass_on(batches[0].tokens.shape)
        return model_inputs(batches, self.mesh)

    def _pass_on(self, shape: torch.Size) -> None:
        """Prepare the stages for micro-batches of this shape (B, N).

        DeepSpeed's stages tell each other once what they send, which in training may be more, and keep buffers of it.
        """
        now = (shape, self.engine.module.training)
        if self.pipelined and now != self._passed_on:
            self.engine.reset_activation_shape()
        self._passed_on = now

    @property
    def skipped_steps(self) -> int:
        """Steps of the whole run whose gradients were not finite."""
        return self.engine.skipped_steps

    def save(self, folder: Path) -> None:
        """Write this process's part of the state into a folder that all processes name alike."""
        self.write_errors.take_written()  # of a save that failed
        place = {"save_dir": str(folder.parent), "tag": folder.name, "save_latest": False}
        self.engine.save_checkpoint(**place, client_state=self.record)
        self.write_errors.raise_first()

    def load(self, folder: Path) -> None:
        """Read the state that `save` wrote on the same layout."""
        with weights_only.enforced():
            path, _ = self.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        assert path is not None, folder

    def load_universal(self, folder: Path) -> None:
        """Read the state that `save` wrote on any layout, in its universal form."""
        source, every = UniversalFolder(folder), set(self.partitions)
        load_weights(self.engine.module, self.partitions, self.mesh.tp, source, every)
        trained = with_moments(self.engine.module, source, every)
        if trained:  # no moments mean that no update was made
            (updates,) = set(trained.values())
            load_moments(self.engine, self.partitions, self.mesh.tp, source, trained, updates)
        for counter, count in source.counters.items():
            setattr(self.engine, counter, count)

    def load_weights(self, source: WholeTensors) -> Comparison:
        """Take the weights alone, those that fit; returns what did and what did not."""
        comparison = compare(gathered_shapes(self.engine.module, self.partitions, self.mesh), source)
        load_weights(self.engine.module, self.partitions, self.mesh.tp, source, comparison.common)
        return comparison

    def load_moments(self, source: WholeTensors) -> int:
        """Take AdamW's moments of the weights that fit; returns of how many, over all stages."""
        comparison = compare(gathered_shapes(self.engine.module, self.partitions, self.mesh), source)
        own = with_moments(self.engine.module, source, comparison.common)
        every = {name: updates for part in self.mesh.gather_objects(own) for name, updates in part.items()}
        if every:  # a stage that has none of them counts with the others
            updates = max(every.values())
            load_moments(self.engine, self.partitions, self.mesh.tp, source, own, updates)
        return len(every)
