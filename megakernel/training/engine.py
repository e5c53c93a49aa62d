"""A model under DeepSpeed: inputs, optimizer steps, evaluation, and checkpoint state."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from megakernel.checkpoint.files import CheckpointTensors, client_state, trained_names
from megakernel.checkpoint.sharded_load import (
    Comparison,
    compare,
    exchange_moments,
    exchange_weights,
    gathered_shapes,
    load_moments,
    load_weights,
    stored_updates,
)
from megakernel.checkpoint.whole_tensors import STEP, WholeTensors, partitions
from megakernel.config import Config, Phase
from megakernel.model import LocalModel, ModelSettings, build_model, set_rotary
from megakernel.model.compiled import check_compiler
from megakernel.model.float8 import check_float8, use_float8
from megakernel.model.layer import layer_matrices
from megakernel.model.layer_inputs import LayerInputs, to_layer_inputs
from megakernel.model.settings import DTYPES
from megakernel.model.start import LayerStart
from megakernel.ops.dropout import stream_of, token_numbers
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks

from .deepspeed_config import (
    deepspeed_config,
    micro_batches_per_step,
    zero3_sharding,
)
from .gradients import OwnGradients
from .optimizer import LR_SCALE, build_optimizer, freeze, is_trained
from .schedule import add_near_dropout
from .state_files import StateFiles, States
from .step_costs import ContextTraffic, MemoryPeaks


def _trained_parameters(model: LocalModel) -> int:
    """Numbers in this rank's trained weights, whole where ZeRO 3 has sharded them."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)


MakeModel = Callable[[ModelSettings, Callable[[], float]], LocalModel]
"""Builds a rank's model or pipeline stage, as `build_model` does."""


def counted_labels(batches: Sequence[Batch], mesh: Mesh) -> Tensor:
    """Labels () int64 of all ranks' batches that count in the loss, perhaps none. A collective."""
    count = sum((batch.loss_mask.sum() for batch in batches), start=torch.zeros((), dtype=torch.int64))
    return mesh.sum(count.to(mesh.device), mesh.gradient)


def model_inputs(batches: Sequence[Batch], mesh: Mesh, counted: Tensor | None = None) -> list[LayerInputs]:
    """LayerInputs of each micro-batch, with the number of targets of the global batch. A collective.

    counted: `counted_labels` of the batches, if known.
    """
    if counted is None:
        counted = counted_labels(batches, mesh)
    targets = counted.clamp(min=1).reshape(1)  # without targets the sums of losses are 0, too
    return [to_layer_inputs(batch, targets) for batch in batches]


@torch.no_grad()
def means(measure: Callable[..., Tensor], inputs: Sequence[LayerInputs], mesh: Mesh) -> Tensor:
    """The sum of `measure` over all ranks' inputs; `measure` returns shares of global means."""
    total = sum(
        (measure(*layer_inputs) for layer_inputs in inputs), start=torch.zeros((), device=mesh.device)
    )
    assert isinstance(total, Tensor)
    return mesh.sum(total, mesh.gradient)


def loader_arguments(mesh: Mesh) -> dict[str, Any]:
    """Arguments of `TrainingBatches` and `ValidationBatches` on this rank."""
    return {
        "share": Share(mesh.dp.rank, mesh.dp.size, mesh.cp.rank, mesh.cp.size),
        "builds_index": False,  # `data.build_indices` does it, for which the others wait without a limit
    }


@dataclass(frozen=True)
class StepResult:
    """Measurements of one optimizer step, the same on every rank."""

    loss: float | None
    """Loss of the global batch before the update: mean cross entropy in nats, or that of another objective. None if
    none of its labels counts, as in a batch of conversations in which only a user speaks."""

    grad_norm: float
    """Global gradient norm before clipping; may be inf or nan."""

    skipped: bool
    """Whether the gradients were not finite, so that the weights were not updated."""


class Engine:
    """The DeepSpeed engine of one rank, for its shard of a model or of a pipeline stage.

    make_model: builds other model classes for losses besides the labels' cross entropy.

    Raises UserError, alike on all ranks, if optimizer.trained does not fit the layers of every stage.
    """

    def __init__(self, config: Config, settings: ModelSettings, make_model: MakeModel = build_model):
        mesh = settings.mesh
        assert isinstance(mesh, Mesh)
        self.config = config
        self.mesh = mesh
        self.micro_batches = micro_batches_per_step(config.training, mesh)
        self.pipelined = mesh.pp.size > 1
        self._stage_inputs: tuple[torch.Size, bool] | None = None
        self._step = 0
        start = LayerStart(mesh, DTYPES[config.training.dtype], zero3_sharding(config, mesh))
        settings = replace(settings, start=start, compile=config.training.compile == "layer")
        if settings.compile:
            Ranks.of(mesh).each(lambda: check_compiler(mesh.device))
        if config.training.fp8 != "none":
            Ranks.of(mesh).each(lambda: check_float8(config.training.fp8, mesh.device))
        model = Ranks.of(mesh).each(lambda: self._build_model(settings, make_model))
        optimizer = build_optimizer(model, config, mesh)
        self.partitions = partitions(model)
        trained = trained_names(model, optimizer)
        self.record = client_state(self.partitions, trained)
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config(config, mesh, _trained_parameters(model)),
            mpu=None if self.pipelined else mesh.mpu,
            dist_init_required=False,
        )
        OwnGradients.install(self.engine, mesh)
        # The optimizer has these weights in float32. A pipeline's are in files of layers, which all data ranks write.
        self._has_masters = config.parallel.zero_stage in (1, 2) and not self.pipelined
        self.state_files = StateFiles.install(self.engine, trained if self._has_masters else ())
        self.memory = MemoryPeaks(mesh.device)
        self.traffic = ContextTraffic(self.engine.module)

    def _build_model(self, settings: ModelSettings, make_model: MakeModel) -> LocalModel:
        model = make_model(settings, lambda: self.loss_scale)
        freeze(model, self.config.optimizer.trained, partial(is_trained, self.config))
        if (scaling := self.config.training.fp8) != "none":
            use_float8(layer_matrices(model), scaling)
        if (dropout := self.config.training.near_dropout) is not None:
            add_near_dropout(model, dropout, self.config.run.seed)
        return model

    @property
    def loss_scale(self) -> float:
        """Factor that undoes DeepSpeed's averaging over micro-batches and dp x cp: our losses are shares and add up."""
        return float(self.micro_batches * self.mesh.gradient.size)

    def set_phase(self, phase: Phase) -> None:
        """Switch to the batch sizes and rotary frequencies of a phase, between two steps."""
        training = phase.training
        self.micro_batches = micro_batches_per_step(training, self.mesh)
        # In this order: the second call reads the first's result, and sets a pipeline's micro-batches.
        self.engine.set_train_micro_batch_size(training.micro_batch_size)
        sequences = training.micro_batch_size * self.micro_batches * self.mesh.gradient.size
        self.engine.set_train_batch_size(sequences)
        # ZeRO keeps the value from its construction.
        if hasattr(self.engine.optimizer, "gradient_accumulation_steps"):
            self.engine.optimizer.gradient_accumulation_steps = self.micro_batches
        set_rotary(self.engine.module, phase.model(self.config.model))

    def redraw(self, step: int) -> None:
        """Draw the model's random numbers for training step `step`, counted from 0."""
        attention.redraw(self.engine.module, step)
        if self.config.optimizer.updates is not None:  # for LoRA dropout, which tensor ranks must draw alike
            place = (self.config.run.seed, step, self.mesh.dp.rank, self.mesh.cp.rank)
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        self._step = step
        self.engine.module.begin_step(step)

    def train_step(self, batches: Sequence[Batch], learning_rate: float) -> StepResult:
        """One optimizer step on this rank's micro-batches of a global batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group[LR_SCALE]
        self.engine.train()
        inputs, counted = self._model_inputs(batches)
        if self.config.model.dropout.any:
            inputs = [(*item, self._token_numbers(index, item[0])) for index, item in enumerate(inputs)]
        skipped_before = self.skipped_steps
        with self.traffic.step():
            loss = self._update(inputs)
        attention.finish_step(self.engine.module, self._sum_of_key_heads)
        norm = self.engine.get_global_grad_norm()
        # Attention transfer learns from every token, whatever its label.
        has_loss = self.config.objective.kind == "transfer" or counted.item() > 0
        return StepResult(
            loss=loss if has_loss else None,
            grad_norm=math.nan if norm is None else float(norm),
            skipped=self.skipped_steps > skipped_before,
        )

    def _token_numbers(self, micro_batch: int, tokens: Tensor) -> Tensor:
        """Numbers of a micro-batch's tokens (B, N) for dropout: functions of the seed, the step and their places."""
        sequences, length = tokens.shape
        # As in `order.samples_by_pass`, and a sample may have two sequences.
        first = (micro_batch * self.mesh.dp.size + self.mesh.dp.rank) * sequences
        stream = stream_of(self.config.run.seed, "dropout", self._step)
        return token_numbers(stream, first, sequences, self.mesh.cp.rank * length, length, tokens.device)

    def _sum_of_key_heads(self, counted: Tensor) -> Tensor:
        """The sum of what this rank has counted for its key heads, with all ranks that hold them."""
        copies = self.mesh.copies(self.config.model.kv_heads)
        total = self.mesh.sum(counted, self.mesh.gradient)
        return total if copies is None else self.mesh.sum(total, copies)

    def _update(self, inputs: list[LayerInputs]) -> float:
        if self.pipelined:
            # Forward, backward and optimizer overlap across stages.
            with self._phase("step"):
                loss = float(self.engine.train_batch(iter([(item, item[-1]) for item in inputs])))
                self.mesh.stage_sends.finish()
                return loss
        total = torch.zeros((), device=self.mesh.device)
        for index, layer_inputs in enumerate(inputs):
            # DeepSpeed's own count of micro-batches would be wrong after their number changes.
            self.engine.set_gradient_accumulation_boundary(index == len(inputs) - 1)
            with self._phase("forward"):
                loss = self.engine(*layer_inputs)
            with self._phase("backward"):
                self.engine.backward(loss * self.loss_scale)
            with self._phase("optimizer"):
                self.engine.step()
            total += loss.detach()
        return self.mesh.sum(total, self.mesh.gradient).item()

    @contextmanager
    def before_update(self, callback: Callable[[], None]) -> Iterator[None]:
        """Within, call `callback` in each step when the batch's gradients are complete and not yet clipped."""
        optimizer = self.engine.optimizer
        update = optimizer.step

        def call_and_update(*args, **options):
            callback()
            return update(*args, **options)

        # DeepSpeed's optimizers have no hooks; both of its engines call this method.
        optimizer.step = call_and_update
        try:
            yield
        finally:
            del optimizer.step

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.mesh.progress.begin(name)
        with self.memory.phase(name), record_function(name):
            yield

    def evaluate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The metrics of `Model.metric_names`: means over the targets of all ranks' batches; empty without targets."""
        self.engine.eval()
        inputs, counted = self._model_inputs(batches)
        if counted.item() == 0:
            return {}
        names = self.config.model.metric_names
        values = (
            self._evaluated_by_stages(inputs) if self.pipelined else means(self.engine, inputs, self.mesh)
        )
        return dict(zip(names, values.expand(len(names)).tolist()))

    @torch.no_grad()
    def _evaluated_by_stages(self, inputs: list[LayerInputs]) -> Tensor:
        pairs = iter([(item, item[-1]) for item in inputs])
        # DeepSpeed would add to the last training step's total_loss and broadcast the result to the other stages, both
        # only for a single number: our result may be a vector.
        self.engine.total_loss = None
        mean = self.engine.eval_batch(pairs, num_micro_batches=len(inputs), bcast_loss=False)
        self.mesh.stage_sends.finish()
        total = torch.zeros(len(self.config.model.metric_names), device=self.mesh.device)
        if self.mesh.is_last_stage:
            total += mean * len(inputs) / self.micro_batches
        return self.mesh.sum(total, self.mesh.pp)

    def _model_inputs(self, batches: Sequence[Batch]) -> tuple[list[LayerInputs], Tensor]:
        """The inputs, and the labels of all ranks that count."""
        self._reset_stage_buffers(batches[0].tokens.shape)
        counted = counted_labels(batches, self.mesh)
        return model_inputs(batches, self.mesh, counted), counted

    def _reset_stage_buffers(self, shape: torch.Size) -> None:
        """Reset DeepSpeed's pipeline buffers when the shape (B, N) or the mode changes.

        Stages exchange the shapes that they send only once; in training they may send more tensors.
        """
        now = (shape, self.engine.module.training)
        if self.pipelined and now != self._stage_inputs:
            self.engine.reset_activation_shape()
        self._stage_inputs = now

    @property
    def skipped_steps(self) -> int:
        """Steps of the whole run that were skipped because gradients were not finite."""
        return self.engine.skipped_steps

    def checkpoint_states(self, folder: Path) -> States:
        """This rank's part of the state, by file in `folder`, the same on all ranks; the next step changes it.

        `state_files.write` writes it.
        """
        self.state_files.take()  # drop those of a failed save
        place = {"save_dir": str(folder.parent), "tag": folder.name, "save_latest": False}
        self.engine.save_checkpoint(**place, client_state=self.record)
        return self.state_files.take()

    def load(self, folder: Path) -> None:
        """Load a checkpoint of the same layout."""
        optimizer = self.engine.basic_optimizer
        # The checkpoint's settings replace these, but they may differ on purpose (config/resume.py), and runs on GPUs
        # began unfused.
        ours = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        with weights_only.enforce():
            path, _ = self.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        assert path is not None, folder
        if self._has_masters:
            self.engine.optimizer.update_lp_params()
        for group, settings in zip(optimizer.param_groups, ours, strict=True):
            group.update(settings)
        if hasattr(self.engine.optimizer, "clip_grad"):  # ZeRO
            self.engine.optimizer.clip_grad = self.engine.gradient_clipping()
        for tensor, state in optimizer.state.items():
            state[STEP] = state[STEP].to(tensor.device, torch.float32)

    def load_tensors(self, source: CheckpointTensors) -> None:
        """Load a checkpoint of any layout; each rank reads what it holds.

        Raises UserError, alike on all ranks, if a file is damaged.
        """
        names = set(self.partitions)
        self._load_weights(source, names)
        trained = Ranks.of(self.mesh).each(lambda: stored_updates(self.engine.module, source, names))
        (updates,) = self.mesh.all_reduce_max(max(trained.values(), default=0))
        if updates:  # without moments no update was made
            self._load_moments(source, trained, updates)
        for counter, count in source.counters.items():
            setattr(self.engine, counter, count)

    def load_weights(self, source: WholeTensors) -> Comparison:
        """Load the weights that fit, without optimizer state; returns which did and did not."""
        comparison = compare(gathered_shapes(self.engine.module, self.partitions, self.mesh), source)
        self._load_weights(source, comparison.common)
        return comparison

    def load_moments(self, source: WholeTensors) -> int:
        """Load AdamW's moments of the weights that fit; returns their number over all stages."""
        comparison = compare(gathered_shapes(self.engine.module, self.partitions, self.mesh), source)
        local = stored_updates(self.engine.module, source, comparison.common)
        trained = {
            name: updates for part in self.mesh.gather_objects(local) for name, updates in part.items()
        }
        if trained:  # all stages set the same count, those without moments too
            self._load_moments(source, local, max(trained.values()))
        return len(trained)

    def _load_weights(self, source: WholeTensors, names: set[str]) -> None:
        engine, tp, gradient = self.engine, self.mesh.tp, self.mesh.gradient
        arguments = engine.module, self.partitions, tp, source, names, gradient
        Ranks.of(self.mesh).each(lambda: load_weights(*arguments))
        exchange_weights(engine, names, gradient)

    def _load_moments(self, source: WholeTensors, names: Iterable[str], updates: int) -> None:
        engine, tp, gradient = self.engine, self.mesh.tp, self.mesh.gradient
        arguments = engine, self.partitions, tp, source, names, updates, gradient
        Ranks.of(self.mesh).each(lambda: load_moments(*arguments))
        exchange_moments(engine, names, gradient)
