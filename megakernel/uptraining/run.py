"""A whole up-training: its stages one after the other, in one folder, from wherever it stopped."""

import gc
import json
from pathlib import Path
from typing import Any

from data_pipeline.corpus import Corpora
from data_pipeline.objective import open_objective
from megakernel.checkpoint.folder import CheckpointFolder
from megakernel.checkpoint.trained_run import student
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, Uptrain, UserError, check_same_run, to_yaml
from megakernel.config.errors import written_to
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks
from megakernel.training.observing.observed import Providers
from megakernel.training.resume import find_moments
from megakernel.training.run_folder import RunFolder, RunLock, write_whole
from megakernel.training.stop_requests import Stop
from megakernel.training.trainer import Trainer

from .blocks import BlockTransfer
from .identity import Preflight, preflight
from .report import write_events
from .stages import Stage, stages
from .summary import head_scalars, summarize, wanted_model, worst_layers
from .transfer import check_parts_around
from .validation import Validation, measured_on

CONFIG = "config.yaml"

BEFORE = "before.json"
"""What was measured before the first step, so that a run that goes on on the same samples does not measure it again."""

KEPT = "kept_layers.json"
"""The layers that stay softmax, where they were chosen by transfer error."""

_REMAINS = ("metrics.jsonl", "checkpoints", "*/config.yaml")
"""What training leaves in its folder; a job that waits has only its submission there."""


class Uptraining:
    """One process's part of an up-training.

    RUN/config.yaml holds the whole, RUN/N-STAGE is the run of a stage: `megakernel evaluate` and `export` take it,
    and TensorBoard shows the stages side by side. A stage that has its last checkpoint is not run again, so the same
    command goes on from wherever it was stopped.
    """

    def __init__(self, config: Config, mesh: Mesh, providers: Providers):
        """providers: what its runs take from the packages above."""
        self.config, self.mesh, self.providers = config, mesh, providers
        self.uptrain = config.uptrain or Uptrain()
        self.ranks = Ranks.of(mesh)
        self.folder = config.run.folder
        self._lock: RunLock | None = None

    def run(self) -> int:
        """Everything that is left to do; the exit status: 0, or that of a request to stop.

        Raises UserError, alike on all ranks, for a dense model or a run folder that does not fit.
        """
        folder = self.config.init.source
        assert folder is not None
        # What is not there or does not fit is said before anything is written, and not when a stage begins with it.
        source = WeightSource.find("init.from", folder, self.ranks)
        corpora = Corpora(self.config.data)
        # What there is to remark on its tokenizer, the first stage says.
        self.ranks.first(lambda: source.check_tokenizer(corpora))
        self.ranks.first(lambda: self._check_texts(corpora))
        check_parts_around(self.config.model, source.model(), self.uptrain.transfer is not None)
        if (teacher := self.uptrain.distill.teacher) is not None:
            larger = WeightSource.find("uptrain.distill.teacher", teacher, self.ranks)
            self.ranks.first(lambda: larger.check_tokenizer(corpora))
        moments = self.config.init.moments
        if moments is not None and self._reads(moments, source):
            find_moments(moments, self.ranks)
        self.ranks.first(self._open)
        validation = Validation(self.config, self.mesh)
        before = self._before(validation, source)
        done = 0
        while done < len(plan := stages(self.config, self._kept(), source.model())):
            stage = plan[done]
            steps = stage.config.training.steps
            if self._steps(stage) < steps:
                self._note(f"stage {stage.name}: {stage.purpose}, {steps} steps")
                if (zero := stage.config.parallel.zero_stage) != self.config.parallel.zero_stage:
                    self._note(
                        f"with parallel.zero_stage={zero}, which saves weights that are not trained, too"
                    )
                stop = self._train(stage)
                gc.collect()  # engines hold themselves in circles
                if stop:
                    return stop.exit_status
            if stage.config.objective.kind == "transfer":
                self._choose_layers(stage)
            done += 1
        report = summarize(self.config, plan, self._kept() or [], validation, before, source)
        self.ranks.first(lambda: report.write(self.folder))
        if self.config.logging.tensorboard:
            self.ranks.first(lambda: write_events(report, RunFolder(self.config).tensorboard))
        self._note(report.markdown())
        evaluate, export = (
            f"evaluate {student(self.folder)}",
            f"export {self.folder} --to models/{self.folder.name}",
        )
        self._note(f"done; next: megakernel {evaluate}   megakernel {export}")
        return 0

    def _train(self, stage: Stage) -> Stop:
        transfer = self.uptrain.transfer
        if stage.config.objective.kind == "transfer" and transfer is not None and transfer.block_layers:
            options = self.mesh, self.providers, [self.folder], self._note
            return BlockTransfer(stage.config, transfer.block_layers, *options).run()
        return Trainer(stage.config, self.mesh, self.providers, inside=[self.folder]).run()

    def _reads(self, moments: Path, source: WeightSource) -> bool:
        """Whether a stage still has to begin with these moments; one that has a checkpoint goes on with its own."""
        plan = stages(self.config, self._kept() or [], source.model())
        return any(stage.config.init.moments == moments and self._steps(stage) == 0 for stage in plan)

    def _check_texts(self, corpora: Corpora) -> None:
        """Raise UserError for texts shorter than a sequence of the length stage, which is not there yet."""
        length, key = self.uptrain.length, "uptrain.length.seq_len"
        if length is None or any(self.folder.glob("*-length")):
            return
        open_objective(self.config, corpora, "train", length.seq_len, key)
        if self.config.training.eval_seq_len is None:
            open_objective(self.config, corpora, "validation", length.seq_len, key)

    def _open(self) -> None:
        """Make the folder, or go on in that of the same up-training; from here this process alone writes into it."""
        self._refuse_another()  # which leaves everything as it is
        with written_to("run.root", self.config.run.root):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.folder)
        self._refuse_another()  # whoever wrote here until now may have changed it

    def _refuse_another(self) -> None:
        file = self.folder / CONFIG
        if file.exists():
            check_same_run(file.read_text(encoding="utf-8"), self.config, self.folder)
        elif any(list(self.folder.glob(remains)) for remains in _REMAINS):
            raise UserError(
                f"run.name={self.config.run.name}: {self.folder} holds the output of a run but no config.yaml; "
                "restore it, or choose another run.name"
            )

    def _before(self, validation: Validation, source: WeightSource) -> Preflight:
        """What the dense model and the untrained student predict, measured once on the same samples.

        From here on the configuration is fixed: what preflight refuses can be mended in the same folder.
        """
        file, samples = self.folder / BEFORE, measured_on(self.config)
        known = self.ranks.first(lambda: _read(file)) or {}
        is_known = known.get("measured_on") == samples
        if is_known:
            found = Preflight.read(known["found"])
        else:
            self._note(f"preflight of {source.folder}")
            keep = self.uptrain.layers.keep
            # Where `keep` is a number, which layers it stands for is only known after the distillation.
            plan = stages(self.config, keep if isinstance(keep, list) else [], source.model())
            found = preflight(validation, source, wanted_model(self.config, plan))
            self._note(str(found.parity))
        self.ranks.first(lambda: write_whole(self.folder / CONFIG, to_yaml(self.config)))
        if not is_known:
            tree = {"measured_on": samples, "found": found._asdict()}
            self.ranks.first(lambda: write_whole(file, json.dumps(tree, indent=1) + "\n"))
        return found

    def _steps(self, stage: Stage) -> int:
        """Of its newest good checkpoint; 0 where it has none."""
        root = stage.config.run.folder / "checkpoints"
        if not self.ranks.first(root.is_dir):
            return 0
        newest = CheckpointFolder(root, keep=1, ranks=self.ranks).newest_good().checkpoint
        return 0 if newest is None else newest.step

    def _kept(self) -> list[int] | None:
        """The layers that stay softmax, once they are known."""
        if not isinstance(self.uptrain.layers.keep, int):
            return self.uptrain.layers.keep
        if self.uptrain.layers.keep == 0:
            return []
        chosen: list[int] | None = self.ranks.first(lambda: _read(self.folder / KEPT))
        return chosen

    def _choose_layers(self, transfer: Stage) -> None:
        """Keep the layers of the largest transfer errors, if a number of layers is to be kept."""
        count = self.uptrain.layers.keep
        if not isinstance(count, int) or count == 0 or self._kept() is not None:
            return
        kept = self.ranks.first(lambda: worst_layers(head_scalars(transfer.config.run.folder), count))
        self.ranks.first(lambda: write_whole(self.folder / KEPT, json.dumps(kept) + "\n"))
        self._note(f"layers {', '.join(map(str, kept))} stay softmax: largest transfer errors")

    def _note(self, text: str) -> None:
        if self.mesh.rank == 0:
            print(text, flush=True)


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
