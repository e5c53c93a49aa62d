"""A whole up-training: runs its stages one after another in one folder, and continues after interruptions."""

import gc
import json
from pathlib import Path
from typing import Any

from data_pipeline.corpus import Corpora
from data_pipeline.objective import open_objective
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.trained_run import student_run
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, Uptrain, UserError, check_recorded_run, to_yaml
from megakernel.config.errors import report_write_errors
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks
from megakernel.training.observing.observer import Providers
from megakernel.training.resume import find_moments
from megakernel.training.run_folder import RunLock, events_folder, write_atomically
from megakernel.training.stop_requests import Stop
from megakernel.training.trainer import Trainer

from .blocks import BlockTransfer
from .identity import Preflight, preflight
from .report import HEADS, REPORT, send, write_events
from .stages import Stage, stages
from .summary import head_scalars, summarize, wanted_model, worst_layers
from .transfer import check_parts_around
from .validation import Validation, measured_on

CONFIG = "config.yaml"

BEFORE = "before.json"
"""File of the preflight's measurements, which a restart on the same samples reuses."""

KEPT = "kept_layers.json"
"""File of the layers that stay softmax, if they were chosen by transfer error."""

_TRAINING_OUTPUT = ("metrics.jsonl", "checkpoints", "*/config.yaml")
"""Output of training in its folder; a pending job has only its submission there."""


class Uptraining:
    """One process's part of an up-training.

    RUN/config.yaml has the whole configuration, RUN/N-STAGE is the run of a stage: `megakernel evaluate` and `export`
    take it, and TensorBoard shows the stages side by side. Finished stages are skipped, so the same command continues
    an interrupted up-training.
    """

    def __init__(self, config: Config, mesh: Mesh, providers: Providers):
        """providers: functions of higher-level packages that its runs use."""
        self.config, self.mesh, self.providers = config, mesh, providers
        self.uptrain = config.uptrain or Uptrain()
        self.ranks = Ranks.of(mesh)
        self.folder = config.run.folder
        self._lock: RunLock | None = None

    def run(self) -> int:
        """Run all that is left to do; return the exit status: 0, or that of a stop request.

        Raises UserError, alike on all ranks, for an unsuitable dense model or run folder.
        """
        folder = self.config.init.source
        assert folder is not None
        # Missing or unsuitable inputs are reported before anything is written, not when a stage needs them.
        source = WeightSource.find("init.from", folder, self.ranks)
        corpora = self.ranks.on_rank_zero(lambda: Corpora(self.config.data, verify=False))
        # The first stage reports its warnings.
        self.ranks.on_rank_zero(lambda: source.check_tokenizer(corpora))
        self.ranks.on_rank_zero(lambda: self._check_texts(corpora))
        check_parts_around(self.config.model, source.model(), self.uptrain.transfer is not None)
        if (teacher := self.uptrain.distill.teacher) is not None:
            larger = WeightSource.find("uptrain.distill.teacher", teacher, self.ranks)
            self.ranks.on_rank_zero(lambda: larger.check_tokenizer(corpora))
        moments = self.config.init.moments
        if moments is not None and self._starts_from(moments, source):
            find_moments(moments, self.ranks)
        self.ranks.on_rank_zero(self._open_folder)
        validation = Validation(self.config, self.mesh)
        before = self._preflight(validation, source)
        done = 0
        while done < len(plan := stages(self.config, self._kept_layers(), source.model())):
            stage = plan[done]
            steps = stage.config.training.steps
            if self._saved_step(stage) < steps:
                self._note(f"stage {stage.name}: {stage.purpose}, {steps} steps")
                if (zero := stage.config.parallel.zero_stage) != self.config.parallel.zero_stage:
                    self._note(
                        f"with parallel.zero_stage={zero}, which saves weights that are not trained, too"
                    )
                stop = self._train(stage)
                gc.collect()  # engines contain reference cycles
                if stop:
                    return stop.exit_status
            if stage.config.objective.kind == "transfer":
                self._choose_layers(stage)
            done += 1
        report = summarize(self.config, plan, self._kept_layers() or [], validation, before, source)
        self.ranks.on_rank_zero(lambda: report.write(self.folder))
        if self.config.logging.tensorboard:
            self.ranks.on_rank_zero(lambda: write_events(report, events_folder(self.folder)))
        self.ranks.on_rank_zero(lambda: send(report, self.config, self._note))
        tables, _, heads = report.markdown().partition(HEADS)
        self._note(tables.rstrip() + "\n")
        if heads:
            self._note(f"a table of all heads: {self.folder / REPORT}.md")
        following = [f"megakernel evaluate {student_run(self.folder)}"]
        if self.config.model.is_causal:  # encoders have no format of transformers
            following.append(f"megakernel export {self.folder} --to models/{self.folder.name}")
        self._note("\n  ".join(["done; next:", *following]))
        return 0

    def _train(self, stage: Stage) -> Stop:
        transfer = self.uptrain.transfer
        if stage.config.objective.kind == "transfer" and transfer is not None and transfer.block_layers:
            options = self.mesh, self.providers, [self.folder], self._note
            return BlockTransfer(stage.config, transfer.block_layers, *options).run()
        return Trainer(stage.config, self.mesh, self.providers, parent_folders=[self.folder]).run()

    def _starts_from(self, moments: Path, source: WeightSource) -> bool:
        """Whether a stage will start from these moments; a stage with a checkpoint continues from that."""
        plan = stages(self.config, self._kept_layers() or [], source.model())
        return any(stage.config.init.moments == moments and self._saved_step(stage) == 0 for stage in plan)

    def _check_texts(self, corpora: Corpora) -> None:
        """Raise UserError for texts shorter than a sequence of the length stage, unless it has started."""
        length, key = self.uptrain.length, "uptrain.length.seq_len"
        if length is None or any(self.folder.glob("*-length")):
            return
        open_objective(self.config, corpora, "train", length.seq_len, key)
        if self.config.training.eval_seq_len is None:
            open_objective(self.config, corpora, "validation", length.seq_len, key)

    def _open_folder(self) -> None:
        """Create or reopen the run folder and lock it."""
        self._check_same_run()  # before anything is written
        with report_write_errors("run.root", self.config.run.root):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.folder)
        self._check_same_run()  # again, because another process may have written it before the lock

    def _check_same_run(self) -> None:
        has_output = any(any(self.folder.glob(pattern)) for pattern in _TRAINING_OUTPUT)
        if not check_recorded_run(self.config) and has_output:
            raise UserError(
                f"run.name={self.config.run.name}: {self.folder} holds the output of a run but no config.yaml; "
                "restore it, or choose another run.name"
            )

    def _preflight(self, validation: Validation, source: WeightSource) -> Preflight:
        """Run the preflight, once for the same samples, and then write the configuration.

        The configuration is fixed only afterwards, so that one that preflight refuses can be corrected.
        """
        file, samples = self.folder / BEFORE, measured_on(self.config)
        recorded = self.ranks.on_rank_zero(lambda: _read(file)) or {}
        is_recorded = recorded.get("measured_on") == samples
        if is_recorded:
            measured = Preflight.from_json(recorded["found"])
        else:
            self._note(f"preflight of {source.folder}")
            keep = self.uptrain.layers.keep
            # If `keep` is a number, the layers are chosen only after the transfer.
            plan = stages(self.config, keep if isinstance(keep, list) else [], source.model())
            measured = preflight(validation, source, wanted_model(self.config, plan))
            self._note(str(measured.parity))
        self.ranks.on_rank_zero(lambda: write_atomically(self.folder / CONFIG, to_yaml(self.config)))
        if not is_recorded:
            tree = {"measured_on": samples, "found": measured._asdict()}
            self.ranks.on_rank_zero(lambda: write_atomically(file, json.dumps(tree, indent=1) + "\n"))
        return measured

    def _saved_step(self, stage: Stage) -> int:
        """Step of a stage's newest good checkpoint; 0 if it has none."""
        root = stage.config.run.folder / "checkpoints"
        newest = CheckpointFolder(root, keep=1, ranks=self.ranks).newest_good().checkpoint
        return 0 if newest is None else newest.step

    def _kept_layers(self) -> list[int] | None:
        """The layers that stay softmax; None if not chosen yet."""
        if not isinstance(self.uptrain.layers.keep, int):
            return self.uptrain.layers.keep
        if self.uptrain.layers.keep == 0:
            return []
        chosen: list[int] | None = self.ranks.on_rank_zero(lambda: _read(self.folder / KEPT))
        return chosen

    def _choose_layers(self, transfer: Stage) -> None:
        """If `keep` is a number, choose the layers with the largest transfer errors."""
        count = self.uptrain.layers.keep
        if not isinstance(count, int) or count == 0 or self._kept_layers() is not None:
            return
        kept = self.ranks.on_rank_zero(lambda: worst_layers(head_scalars(transfer.config.run.folder), count))
        self.ranks.on_rank_zero(lambda: write_atomically(self.folder / KEPT, json.dumps(kept) + "\n"))
        self._note(f"layers {', '.join(map(str, kept))} stay softmax: largest transfer errors")

    def _note(self, text: str) -> None:
        if self.mesh.rank == 0:
            print(text, flush=True)


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
