"""The training loop."""

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch

from data_pipeline.loader import TrainingBatches, ValidationBatches
from data_pipeline.packing import packing_table
from megakernel.checkpoint.folder import CheckpointFolder, SaveState
from megakernel.checkpoint.manifest import SavedProgress
from megakernel.checkpoint.trained_run import done_message
from megakernel.config import Config, NotFinite
from megakernel.config.data_phases import mixture_at, mixtures
from megakernel.model.compiled import GRAPHS, outside_graphs
from megakernel.model.flops import training_flops_per_token
from megakernel.model.parameters import parameter_count
from megakernel.model.settings import model_settings
from megakernel.parallel import Mesh
from megakernel.parallel.device import has_bfloat16_products
from megakernel.parallel.long_work import long_work
from megakernel.parallel.ranks import Ranks

from . import events, kept_corpora
from .data import build_indices, check_corpora, verified_corpora
from .deepspeed_config import check_deepspeed_keys
from .engine import Engine, StepResult, loader_arguments
from .environment import package_versions
from .observing.console import EVAL_OF_SOURCE, Console
from .observing.gpu_signals import GpuSignals
from .observing.local_work import LocalWork
from .observing.metrics_writer import MetricsWriter, StepMetrics
from .observing.observer import Observer, Providers
from .observing.peak_speed import peak_tflops
from .observing.profiler import Profiler, snapshot_on_out_of_memory
from .observing.throughput import Throughput
from .observing.trackers import Trackers
from .resume import resume, start_from_weights, start_with_adapter, start_with_moments
from .run_folder import RunFolder, allow_new_learning_rates, stop_file
from .saver import Saver
from .schedule import learning_rate
from .stop_requests import Stop, StopRequests
from .watchdog import Watchdog

_MANY_PASSES = 4
"""Passes over a text from which on more of it would teach a model clearly more than another pass."""

_JUMP = 0.01
"""Smallest relative change of the learning rate between two steps that may be reported."""

_MOST_CORPORA = 100
"""Corpora that are listed one by one at the start."""


class Trainer:
    """One rank's part of a run: reads its share of the data, runs its engine, and on rank 0 reports.

    Raises UserError, alike on all ranks, for data and run folders that do not fit the configuration, and for keys that
    DeepSpeed rejects.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        providers: Providers,
        parent_folders: Sequence[Path] = (),
        allowed: Sequence[str] = (),
    ):
        """providers: functions of higher packages.

        parent_folders: folders of the up-training that this run is a stage of, whose stop files also end it.
        allowed: keys of the run that may change at this start, as `check_same_run` takes them."""
        check_deepspeed_keys(config)
        self.config = config
        self.mesh = mesh
        self.providers = providers
        self.parent_folders = parent_folders
        self.ranks = Ranks.of(mesh)
        evaluates, loader = config.training.eval_samples > 0, loader_arguments(mesh)
        found = check_corpora(config, self.ranks, evaluates)  # before a run folder is made
        self.folder = RunFolder(config, self.ranks, allowed)
        self.console = Console(config.training.steps, self._consumed(config.training.steps)[1])
        changes = self.folder.open([_device_name(mesh.device)])
        for change in changes:
            self._note(f"{change.key} was {change.recorded!r} and is now {change.wanted!r}")
        self.corpora = verified_corpora(config, mesh, found, [*parent_folders, self.folder.path])
        self.folder.keep_tokenizer(self.corpora.tokenizer_folder, self.corpora.tokenizer_hash)
        self._keep_corpora(evaluates)
        self.batches = TrainingBatches(config, self.corpora, **loader)
        self.validation = ValidationBatches(config, self.corpora, **loader) if evaluates else None
        build_indices(config, mesh, self.batches, *([self.validation] if self.validation else []))
        settings = model_settings(config, mesh, self.corpora.vocab_size)
        # model.vocab_size may be larger than the tokenizer's.
        self.vocab_size = settings.vocab_size - config.model.special_ids
        self.engine = Engine(config, settings, providers.make_model(config, self.corpora, self.ranks))
        self.work = LocalWork(self.engine.engine.module, mesh)
        self.gpus = GpuSignals(mesh, self._note)
        self.checkpoints = CheckpointFolder(
            self.folder.checkpoints, config.checkpoint.keep, config.checkpoint.keep_every, self.ranks
        )
        self.layout = {
            "tensor": mesh.tp.size,
            "context": mesh.cp.size,
            "data": mesh.dp.size,
            "pipeline": mesh.pp.size,
            "zero_stage": config.parallel.zero_stage,
        }
        self.mixtures = mixtures(config.data, config.training)
        self.skipped_in_a_row = 0
        self.steps_read = self.steps_without_loss = 0  # of this start
        self.warned_of_no_loss = False
        self.entry = StepMetrics()

    def run(self) -> Stop:
        """Train until the last step or a stop request, and save; returns the request that left something to do."""
        steps = self.config.training.steps
        done = self._load()
        if done >= steps:
            self._note(done_message(self.folder.path, done, steps))
            return Stop.NONE
        self._print_summary(done)
        self._warn_of_jump(done)
        with ExitStack() as stack:
            folders = [self.folder.path, *self.parent_folders] if self.mesh.rank == 0 else []
            requests = stack.enter_context(StopRequests(*map(stop_file, folders)))
            self.writer = self._open_writer(stack, done)
            self.throughput = self._make_throughput()
            self.observer = self._make_observer(stack)
            self._set_phase(done)
            self._note_mixture(done)
            self.saver = stack.enter_context(Saver(self.engine, self.checkpoints, self._note, self._saved))
            if done == 0:
                self._evaluate(0)
                self._write_entry(0)
            batches = stack.enter_context(closing(self.batches.from_step(done)))
            parallel = self.config.parallel
            limits = parallel.timeout_minutes, parallel.stall_minutes
            watchdog = stack.enter_context(
                Watchdog(
                    self.mesh,
                    *limits,
                    self.folder.path,
                    lambda: {"slowest": self.work.slowest, **self.gpus.found},
                )
            )
            for step in range(done, steps):
                if step == self.phase.end_step:
                    self._set_phase(step)
                    watchdog.expect_slow_step()
                if step > done and any(step == mixture.first_step for mixture in self.mixtures):
                    self._note_mixture(step)
                with watchdog.step(step):
                    self._step(step, batches)
                    with self.mesh.progress.waiting("agreement to continue"):
                        agreed = self.mesh.all_reduce_max(requests.pending(), self.saver.state)
                stop = Stop(agreed[0])
                self._advance_save(SaveState(agreed[1]))
                if stop:
                    requests.accept(stop)
                    self._record("signalled", signal=stop.name, step=step + 1)
                self._after_step(step + 1, stop)
                if stop:
                    requests.saved()
                if stop and (step + 1 < steps or self.parent_folders):  # further stages may follow
                    self._note(
                        f"stopped by {stop.name} after step {step + 1}; start the same command to continue"
                    )
                    return stop
                if self.mesh.rank == 0:
                    self.console.progress(step + 1)
        if not self.parent_folders:
            self._note("\n  ".join(["done; next:", *self._next_commands()]))
        return Stop.NONE

    def _print_summary(self, done: int) -> None:
        """Print model size, devices, layout and remaining steps."""
        config, mesh = self.config, self.mesh
        count = parameter_count(config.model, self.vocab_size, config.training.seq_len)
        layout = "".join(f", {axis} {size}" for axis, size in self.layout.items() if size > 1)
        steps = config.training.steps
        tokens = self._consumed(steps)[1] - self._consumed(done)[1]
        self._note(
            f"{self.folder.path}: {count:,} parameters in {config.training.dtype} on {mesh.world_size} x "
            f"{_device_name(mesh.device)}{layout}"
        )
        self._note(f"{steps - done:,} steps, {tokens:,} tokens to go")
        if config.training.dtype == "bfloat16" and not has_bfloat16_products(mesh.device):
            self._note(
                "warning: training.dtype=bfloat16: this CPU has no matrix products in bfloat16, and a step takes "
                "several times as long as in float32; set training.dtype=float32"
            )
        if config.training.compile != "none":
            self._note(
                "training.compile=layer: layers are compiled in the first step of each sequence length, which may take "
                "minutes"
            )
            reasons = Counter(outside_graphs(one, mesh.cp.size) for one in config.model.attentions)
            for reason, layers in reasons.items():
                if reason is not None:
                    self._note(f"attention of {layers} layers is not compiled: {reason}")
            if config.training.profile is not None:
                self._note(
                    "training.profile with training.compile=layer: layers run compiled while it records, and the trace "
                    "names them but none of their parts; set training.compile=none for those"
                )
        self._print_corpora()
        sources = [] if self.validation is None else self.validation.sources
        if config.training.eval_sources and len(sources) < 2:
            self._note(f"training.eval_sources=true has no effect on {len(sources)} validation corpora")

    def _warn_of_jump(self, done: int) -> None:
        """Warn if the learning rate changes more, from the last step before this start to its first, than after it."""
        recorded = self.folder.recorded
        if recorded is None or done == 0:
            return
        last, instead, now, following = (
            learning_rate(step, one.schedule, one.optimizer.lr, one.training.steps)
            for one in (recorded, self.config)
            for step in ((done - 1, done) if one is recorded else (done, done + 1))
        )
        if abs(now - last) > max(_JUMP * last, 1.5 * abs(following - now)):
            self._note(
                f"warning: the learning rate jumps: step {done} had {last:.3e}, and step {done + 1} has {now:.3e} "
                f"instead of {instead:.3e}; schedule.name={self.config.schedule.name} depends on the step, "
                "optimizer.lr and training.steps"
            )

    def _print_corpora(self) -> None:
        """Print how much of each corpus the run reads, and which stages it ends before."""
        for mixture in self.mixtures[1:]:
            if mixture.first_step >= self.config.training.steps:
                self._note(
                    f"{mixture.key.removesuffix('.train')} begins after {mixture.first_step} steps, and training.steps="
                    f"{self.config.training.steps} ends before it"
                )
        use = self.batches.use()
        for one in use[:_MOST_CORPORA]:
            self._note(f"data of {one}")
        if further := use[_MOST_CORPORA:]:
            passes = [one.passes for one in further]
            self._note(
                f"data of {len(further)} more: {100 * sum(one.share for one in further):.4g} % of what is read, "
                f"{min(passes):.2f} to {max(passes):.2f} passes over each in the run"
            )
        if self.config.model.kind in ("classifier", "encoder_decoder"):  # small tasks are read in many passes
            return
        repeated = [one for one in use if one.passes > _MANY_PASSES]
        if repeated:
            most = max(repeated, key=lambda one: one.passes)
            others = f" and {len(repeated) - 1} more corpora" if len(repeated) > 1 else ""
            self._note(
                f"warning: {most.key}={most.corpus}{others} would be read more than {_MANY_PASSES} times (at most "
                f"{most.passes:.1f}); give more text, give it less weight, or lower training.steps"
            )

    def _next_commands(self) -> Iterator[str]:
        path = self.folder.path
        run, root = shlex.quote(str(path)), shlex.quote(str(path.parent))
        if self.config.training.eval_samples:  # else there may be no validation split
            yield f"megakernel evaluate {run}"
        if self.config.model.kind in ("causal_lm", "encoder_decoder"):
            yield f"megakernel generate {run} --prompt TEXT"
        yield "megakernel monitor" + (f" --root {root}" if path.parent != Path("runs") else "")

    def _keep_corpora(self, evaluates: bool) -> None:
        """Compare the texts with those of the run's earlier starts, and record them."""
        path, began = self.folder.path, self.folder.recorded is not None
        warnings = self.ranks.on_rank_zero(
            lambda: kept_corpora.keep(path, self.corpora, began=began, evaluates=evaluates)
        )
        for warning in warnings:
            self._note(warning)

    def _load(self) -> int:
        """Load the checkpoint or the initial weights; returns the completed steps."""
        done = resume(self.engine, self.checkpoints, self.layout, self.ranks, self._note)
        if done:
            return done
        init, model, lora = self.config.init, self.config.model, self.config.optimizer.updates
        here = (self.engine, self.ranks, self._note)
        if init.source is not None:
            start_from_weights(init.source, model, self.corpora, *here)
        if init.adapter is not None and lora is not None:
            start_with_adapter(init.adapter, model, lora, *here)
        if init.moments is not None:
            start_with_moments(init.moments, model, *here)
        return 0

    def _set_phase(self, step: int) -> None:
        """Switch to the phase of `step`."""
        training = self.config.training
        self.phase = training.phase_of(step)
        self.engine.set_phase(self.phase)
        now = self.phase.training
        self.tokens_per_step = now.global_batch_size * now.seq_len * self.config.model.sequences_per_sample
        sizes = (now.seq_len, self.vocab_size, self.config.predicted_share)
        self.flops_per_token = training_flops_per_token(self.config.model, *sizes)
        if training.seq_len_schedule:
            self._note(
                f"from step {step + 1}: sequences of {now.seq_len:,} tokens, {now.global_batch_size} in a step"
            )

    def _note_mixture(self, step: int) -> None:
        """Print what `step` and those after it read, if the run has several mixtures."""
        if len(self.mixtures) > 1:
            now = self.mixtures[mixture_at(step, self.mixtures)]
            corpora = ", ".join(str(corpus.path) for corpus in now.corpora)
            self._note(f"from step {step + 1}: text of {now.key}: {corpora}")

    def _step(self, step: int, batches) -> None:
        training = self.config.training
        rate = learning_rate(step, self.config.schedule, self.config.optimizer.lr, training.steps)
        with self.throughput.loading():
            micro_batches = next(batches)
        self.engine.redraw(step)
        is_logged = (step + 1) % training.log_every == 0 or step + 1 == training.steps
        if is_logged:
            self.gpus.sample()
        with self.observer.step(step + 1, self.entry):
            result = self.engine.train_step(micro_batches, rate)
        self.throughput.step(self.tokens_per_step, self.flops_per_token)
        self.observer.after_step(step + 1, micro_batches, self.entry)
        if compiled := GRAPHS.new():
            self._note(f"step {step + 1}: {compiled}")
        self.steps_read += 1
        self.steps_without_loss += result.loss is None
        self._check_finite(step + 1, result)
        if is_logged:
            self._log(step + 1, result, rate)

    def _check_finite(self, step: int, result: StepResult) -> None:
        """Count consecutive skipped steps, and end the run after training.max_skipped_steps."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if result.skipped:
            self._note(f"step {step} skipped: loss {result.loss}, gradient norm {result.grad_norm}")
        elif self.mesh.rank == 0:
            self.folder.fix_configuration()
        if self.skipped_in_a_row >= self.config.training.max_skipped_steps:
            if self.mesh.rank == 0:
                for run in (self.folder.path, *self.parent_folders):
                    allow_new_learning_rates(run)
            raise NotFinite(
                f"training.max_skipped_steps={self.skipped_in_a_row}: that many steps in a row had a loss or gradient "
                f"that is not finite, up to step {step}; no checkpoint holds them. Lower optimizer.lr, or skip the "
                "data with training.skip_samples, and start the same command again"
            )

    def _log(self, step: int, result: StepResult, rate: float) -> None:
        steps, speed = self.throughput.steps, self.throughput.scalars()
        times = speed["throughput/data_time"], speed["throughput/step_time"]
        scalars = speed | self.work.scalars(steps, *times)
        scalars |= self.engine.memory.scalars() | self.engine.traffic.scalars()
        scalars |= self.saver.scalars() | self.gpus.scalars()
        scalars |= {
            "train/lr": rate,
            "train/grad_norm": result.grad_norm,
            "train/tokens": float(self._consumed(step)[1]),
            "train/seq_len": float(self.phase.training.seq_len),
            "train/skipped_steps": float(self.engine.skipped_steps),
            "train/steps_without_loss": float(self.steps_without_loss),
        }
        scalars |= self.engine.engine.module.scalars()
        if result.loss is not None:
            stage = mixture_at(step - 1, self.mixtures)
            scalars |= {"train/loss": result.loss} | self._bits_per_byte("train", result.loss, "train", stage)
        if self.steps_without_loss:
            self._warn_of_no_loss()
        self.entry.scalars |= scalars
        if self.mesh.rank == 0:
            self.console.step(step, scalars)

    def _warn_of_no_loss(self) -> None:
        if self.warned_of_no_loss:
            return
        self.warned_of_no_loss = True
        share = self.steps_without_loss / self.steps_read
        self._note(
            f"warning: in {self.steps_without_loss} of {self.steps_read} batches so far ({share:.0%}) no token counts, "
            "and they have no loss; train/steps_without_loss counts them on. Raise training.global_batch_size or "
            "training.seq_len, or leave out conversations without answers"
        )

    def _after_step(self, step: int, stop: Stop) -> None:
        training, every = self.config.training, self.config.checkpoint.every
        last = step == training.steps
        if last or (training.eval_every is not None and step % training.eval_every == 0):
            self._evaluate(step)
        self._write_entry(step)
        if last or stop or step % every == 0:
            self._save(step, waits=last or bool(stop))
        if last and self.writer is not None:
            self.writer.finish(self.config)

    def _evaluate(self, step: int) -> None:
        if self.validation is None:
            return
        self.mesh.progress.begin("evaluation")
        with self.throughput.excluded():
            measured = self.engine.evaluate(list(self.validation))
        if not measured:
            self._note(
                f"eval at step {step}: no token of the {self.validation.samples} validation samples counts, so there "
                "is no loss; raise training.eval_samples"
            )
            return
        scalars = {f"eval/{name}": value for name, value in measured.items()}
        scalars |= self._bits_per_byte("eval", measured["loss"], "validation")
        if self.config.training.eval_sources:
            with self.throughput.excluded():
                for source, batches in self.validation.by_source():
                    if found := self.engine.evaluate(batches):
                        scalars[f"{EVAL_OF_SOURCE}{source}"] = found["loss"]
        self.entry.scalars |= scalars
        self.observer.after_evaluation(self.entry)
        if self.mesh.rank == 0:
            self.console.evaluation(step, scalars)

    def _bits_per_byte(self, tag: str, loss: float, split: str, stage: int = 0) -> dict[str, float]:
        """Bits per byte, if the loss is a code length: a causal model's cross entropy of all tokens of texts."""
        is_cross_entropy = tag == "eval" or self.config.objective.kind == "labels"
        if not is_cross_entropy or not self.config.model.is_causal or not self.corpora.is_text(split, stage):
            return {}
        return {f"{tag}/bits_per_byte": self.corpora.bits_per_byte(loss, split, stage)}

    def _save(self, step: int, waits: bool) -> None:
        """Begin a save; waits: until it is complete, because the run ends."""
        samples, tokens = self._consumed(step)
        progress = SavedProgress(
            step=step,
            consumed_samples=samples,
            consumed_tokens=tokens,
            layout=self.layout,
            versions=package_versions(),
        )
        with self.throughput.excluded():
            # Consecutive skipped steps may end the run: the checkpoint before them is kept until a step succeeds.
            self.saver.begin(progress, prune=not self.skipped_in_a_row)
            if waits:
                self.saver.finish()

    def _advance_save(self, agreed: SaveState) -> None:
        """Go on with a save that has begun, if all ranks are ready to."""
        if self.checkpoints.is_saving and agreed is not SaveState.WRITING:
            with self.throughput.excluded():
                self.saver.advance(agreed)

    def _saved(self, step: int) -> None:
        if self.mesh.rank == 0:
            self.folder.fix_configuration()
        self._record("saved", step=step)

    def _consumed(self, steps: int) -> tuple[int, int]:
        """Samples and tokens that the first `steps` steps of the run read."""
        samples, tokens = self.config.training.consumed(steps)
        return samples, tokens * self.config.model.sequences_per_sample

    def _open_writer(self, stack: ExitStack, done: int) -> MetricsWriter | None:
        minutes = self.config.parallel.timeout_minutes
        packing, cut = long_work(
            self.mesh,
            "packing statistics",
            minutes,
            lambda: (self.batches.packing(done), self.batches.cut(done)),
        )
        if self.mesh.rank != 0:
            return None
        tensorboard = self.folder.events if self.config.logging.tensorboard else None
        path = self.folder.path
        name = f"{path.parent.name}/{path.name}" if self.parent_folders else path.name
        trackers = Trackers(self.config, path, self._note, name, stop=stop_file(path).touch)
        writer = stack.enter_context(MetricsWriter(self.folder.metrics_file, tensorboard, done, trackers))
        for one in packing:
            self._note(f"packing of {one}")
        for documents in cut:
            self._note(f"lengths of {documents}")
        writer.describe(self.config, packing_table(packing) if packing else "")
        return writer

    def _make_observer(self, stack: ExitStack) -> Observer:
        run, rank, device = self.folder.path, self.mesh.rank, self.mesh.device
        stack.enter_context(snapshot_on_out_of_memory(run, rank))
        wanted, excluded = self.config.training.profile, self.throughput.excluded
        model = self.engine.engine.module
        profiler = stack.enter_context(Profiler(wanted, model, run, rank, device, self._note, excluded))
        return Observer(self.config, self.engine, self.corpora, self.providers, profiler, excluded)

    def _make_throughput(self) -> Throughput:
        # The table has bfloat16 peaks.
        is_half = self.config.training.dtype == "bfloat16"
        known = peak_tflops(_device_name(self.mesh.device)) if is_half else None
        peak = self.config.logging.peak_tflops or known
        return Throughput(self.mesh.device, self.mesh.world_size, peak)

    def _write_entry(self, step: int) -> None:
        """Write a step's metrics as one entry, and begin the next."""
        if self.writer is not None:
            self.writer.write(step, self.entry)
        self.entry = StepMetrics()

    def _record(self, event: str, **facts: Any) -> None:
        if self.mesh.rank == 0:
            with suppress(OSError):  # if only this rank failed, the others would wait for it
                events.record(self.folder.path, event, **facts)

    def _note(self, text: str) -> None:
        if self.mesh.rank == 0:
            self.console.note(text)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
