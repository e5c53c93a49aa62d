"""The runs of a study: their configurations, and training, up-training and evaluating them unless that is done."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from benchmarks.training_runs import (
    best_step,
    evaluate_tasks,
    metric_curve,
    run_megakernel,
    train_run,
    uptrain_run,
)
from data_pipeline.manifest import Manifest
from megakernel.checkpoint.trained_run import CONTROLS, DENSE
from megakernel.config import Config, ConfigError, Problem, UserError, load
from megakernel.evaluation.records import file_name

from .study import LoadedStudy, Overrides, read_study


@dataclass(frozen=True)
class RunOptions:
    """What the command line changes in the models' runs; the run that they are up-trained from stays as it is."""

    overrides: Sequence[str] = ()
    """`section.key=value`."""

    tokens: int | None = None
    """Training tokens instead of training.steps."""


@dataclass(frozen=True)
class StudyRun:
    """One model of a study, in one variant and with one seed."""

    study: LoadedStudy
    name: str
    """The model's name."""

    variant: str
    seed: int
    file: Path
    """The configuration file that `overrides` change."""

    overrides: list[str]
    names: dict[str, Any]
    """What `{names}` stand for in texts of the study."""

    start: "StudyRun | None" = None
    """The run that this one is up-trained from."""

    @cached_property
    def config(self) -> Config:
        """The whole configuration."""
        return load(self.file, self.overrides)

    @cached_property
    def split(self) -> str:
        """The split for {split}; the data have to be there."""
        manifests = [Manifest.read(corpus.path) for corpus in self.config.data.corpora_of("validation")]
        return "test" if all("test" in manifest.splits for manifest in manifests) else "validation"

    def fill(self, text: str, **names: Any) -> str:
        """A text of the study with `{names}` filled in; names: more of them."""
        split = {"split": self.split} if "{split}" in text else {}
        return self.study.fill(text, {**self.names, **names, **split})

    @property
    def tasks(self) -> dict[str, str]:
        """Name -> `megakernel evaluate --task`."""
        return {name: self.fill(task) for name, task in self.study.study.tasks.items()}

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.name, self.variant, self.seed and f"seed {self.seed}")))


def make_run(
    study: LoadedStudy, name: str, variant: str, seed: int, options: RunOptions = RunOptions()
) -> StudyRun:
    """The run of one of the study's models."""
    start = _start_run(study, variant, seed)
    return _run(study, study.config_file(variant), name, variant, seed, options, study.model_overrides, start)


def _start_run(study: LoadedStudy, variant: str, seed: int) -> StudyRun | None:
    start = study.study.start
    if start is None:
        return None
    other = study if start.study is None else read_study(start.study)
    variant = variant if other is study else next(iter(other.study.variants))
    file = other.config_file(variant) if start.config is None else study.path(start.config)
    name, overrides = start.model or start.name, start.overrides

    def keys(name: str, variant: str) -> Overrides:
        return {**(other.model_overrides(name, variant) if start.model else {}), **overrides}

    return _run(other, file, name, variant, seed, RunOptions(), keys, None)


def _run(
    study: LoadedStudy,
    file: Path,
    name: str,
    variant: str,
    seed: int,
    options: RunOptions,
    keys: Callable[[str, str], Overrides],
    start: StudyRun | None,
) -> StudyRun:
    setting, data = study.study.variants[variant], study.study.data
    shared = [*_texts(study.study.overrides), *_texts(setting.overrides)]
    if start is not None:
        read = start.config.training.consumed(start.config.training.steps)[0]
        folder = start.config.run.folder
        source = folder.parent / "hf" if study.study.start and study.study.start.export else folder
        shared += [f"init={{from: {source}, moments: {folder}}}", f"training.skip_samples=[[0, {read}]]"]
    more = list(options.overrides)
    plain = load(file, [*shared, *more])
    if options.tokens is not None:
        more.append(f"training.steps={options.tokens // _step_tokens(plain)}")
        plain = load(file, [*shared, *more])
    training = plain.training
    names = {"name": file_name(name), "variant": variant, "seed": seed, "seq_len": training.seq_len}
    names["samples"] = study.study.evaluated_tokens // training.seq_len
    if data is not None:
        names["examples"] = study.examples(plain)
        if data.out is not None:
            shared.append(f"data.train={study.fill(data.out, names)}")
    shared.append(f"run.root=runs/{study.name}")
    parts = study.fill(study.study.run, names).split("-")
    last = {"run.name": "-".join(filter(None, parts)), "run.seed": plain.run.seed + seed}
    overrides = [*shared, *_texts(keys(name, variant)), *more, *_texts(last)]
    return StudyRun(study, name, variant, seed, file, overrides, names, start)


def _step_tokens(config: Config) -> int:
    return config.training.seq_len * config.training.global_batch_size


def _texts(keys: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


@dataclass(frozen=True)
class StudyResult:
    """A trained model, or a line of an up-training's report: what a row's cells are measured from."""

    run: StudyRun
    name: str
    config: Config
    folder: Path | None
    """The folder of its run; None for models that are no run's."""

    step: int
    entry: Mapping[str, Any]
    """Its entry in the up-training's report."""

    report: Mapping[str, Any]
    """The report of the up-training; empty without one."""

    nproc: int

    @property
    def key(self) -> tuple[str, str, int]:
        """Results with equal keys are one: students share their dense model and its controls."""
        return self.name, self.run.variant, self.run.seed

    @cached_property
    def costs(self) -> tuple[int, float, float]:
        """Parameters of the model, and FLOPs per token of a forward pass and of training."""
        # Take seconds, and few studies need them.
        from megakernel.model.flops import flops_per_token, training_flops_per_token
        from megakernel.model.parameters import parameter_count

        model, data = self.config.model, self.config.data
        sizes = self.config.training.seq_len, Manifest.read(data.train[0].path).tokenizer.vocab_size
        predicted = data.masking.rate if model.kind == "masked_lm" else 1.0
        return (
            parameter_count(model, sizes[1], sizes[0]),
            flops_per_token(model, *sizes, predicted),
            training_flops_per_token(model, *sizes, predicted),
        )

    @cached_property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """Name of a task -> its result, measured unless its file exists; empty for models that are no run's."""
        return {} if self.folder is None else evaluate_tasks(self.folder, self.step, self.run.tasks)

    def curve(self, tag: str) -> dict[int, float]:
        """Step -> value of a metric of its training."""
        return {} if self.folder is None else metric_curve(self.folder, tag)


def prepare(run: StudyRun) -> None:
    """Make the data of a run unless their folder exists."""
    data, folder = run.study.study.data, run.config.data.train[0].path
    if folder.exists():
        _say(f"{folder} exists and is used as it is")
    if data is None or folder.exists():
        return
    source = run.fill(data.source)
    if data.made_by is not None and not Path(source).exists():
        command = [sys.executable, "-m", data.made_by, "--out", str(Path(source).parent)]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise UserError(f"`{shlex.join(command[1:])}` failed; run this again when it can work")
    options = [text for key, value in data.options.items() for text in (f"--{key}", run.fill(str(value)))]
    arguments = ("--source", source, "--tokenizer", data.tokenizer, *options, "--out", str(folder))
    run_megakernel("prepare", *arguments)


@cache
def _say(text: str) -> None:
    """Print a line on stderr, once."""
    print(text, file=sys.stderr)


def train(run: StudyRun, nproc: int) -> Iterator[StudyResult]:
    """Finish a run; yields its model, or the models of its up-training's report that the study's `rows` name."""
    processes = ("--nproc", str(nproc)) if nproc > 1 else ()
    if run.start is None:
        folder = train_run(run.file, run.overrides, *processes)
        step = best_step(folder) if run.study.study.checkpoint == "best" else run.config.training.steps
        yield StudyResult(run, run.name, run.config, folder, step, {}, {}, nproc)
        return
    prepare(run.start)
    dense = next(train(run.start, nproc))
    source = run.config.init.source
    if run.study.study.start and run.study.study.start.export and source and not source.exists():
        run_megakernel("export", str(dense.folder), "--to", str(source))
    folder, report = uptrain_run(run.file, run.overrides, *processes)
    yield from _report_results(run, dense, folder, report, nproc)


def _report_results(
    run: StudyRun, dense: StudyResult, folder: Path, report: Mapping[str, Any], nproc: int
) -> Iterator[StudyResult]:
    """The results of an up-training, named by the model alone if only one of its rows is the student's."""
    wanted, start = run.study.study.rows, run.study.study.start
    assert start is not None
    found: list[tuple[str, Mapping[str, Any], Path | None]] = [("swapped", report["swapped"], None)]
    for stage in report["stages"]:
        place = folder / Path(stage["folder"]).name
        found.append((place.name.partition("-")[2].rstrip("0123456789"), stage, place))
    found += [("ablations", entry, None) for entry in report["ablations"]]
    found = [item for item in found if item[0] in wanted]
    students = sum(not _is_control(kind, entry) for kind, entry, _ in found)
    if "start" in wanted:
        tokens = dense.config.training.consumed(dense.step)[1]
        entry = {**report["dense"], "tokens": tokens}
        # Measured like the models of this study.
        yield StudyResult(run, start.name, dense.config, dense.folder, dense.step, entry, report, nproc)
    for kind, entry, place in found:
        config = run.config if place is None else load(place / "config.yaml")
        name = entry["name"]
        if not _is_control(kind, entry):
            name = run.name if students == 1 else f"{run.name}: {name}"
        yield StudyResult(run, name, config, place, config.training.steps, entry, report, nproc)


def _is_control(kind: str, entry: Mapping[str, Any]) -> bool:
    """Whether a row is the same for all students."""
    return kind in CONTROLS or entry["name"].startswith(DENSE)


def check_names(runs: Sequence[StudyRun]) -> None:
    """Raise ConfigError if two runs would share a folder."""
    folders: dict[Path, StudyRun] = {}
    for run in runs:
        other = folders.setdefault(run.config.run.folder, run)
        if other is not run:
            problem = Problem(
                f"{run.study.file}: run", run.study.study.run, f"names {run} and {other} alike", "add {seed}"
            )
            raise ConfigError([problem])
