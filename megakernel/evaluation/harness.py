"""`--task lm_eval:NAME`: a task of lm-evaluation-harness, in this process; needs the extra `eval`."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_pipeline.spec import build, parse_options
from data_pipeline.tokenizers import unreachable
from megakernel.config import UserError
from megakernel.config.errors import first_line, nearest_first
from megakernel.config.extras import need
from megakernel.config.section import Section

from .result import Table, number
from .subject import ContinueTexts, LoadedRun, OnPass, OpenedRun

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

LM_EVAL = "lm_eval"
"""Name of the task."""

OPTION = "--task"


class HarnessOptions(Section):
    """Options of `lm_eval:NAME,`."""

    fewshot: int | None = None
    """Examples before each question; null: as the task says, else 0."""

    samples: int | None = None
    """Documents of each of its tasks, the first ones; null takes --samples, else all."""


@dataclass
class HarnessTask:
    """A task, group or tag of the harness."""

    spec: str
    name: str
    options: HarnessOptions
    include_path: Path | None
    """Folder of further tasks' YAML files."""

    continue_texts: ContinueTexts | None
    """What generates text; None: tasks that generate are refused."""

    split: str | None = field(default=None, init=False)
    """None: it brings its own data."""

    _loaded: Mapping[str, Any] = field(default_factory=dict, init=False)

    @classmethod
    def parse(
        cls, spec: str, samples: int | None, include_path: Path | None, continue_texts: ContinueTexts | None
    ) -> "HarnessTask":
        """The task of `lm_eval:NAME` or `lm_eval:NAME,key=value`. UserError for no name, a wrong option, no harness."""
        name, comma, rest = spec.partition(":")[2].partition(",")
        if not name or "=" in name:
            raise UserError(
                f"{OPTION} {spec} names no task of the harness; write {OPTION} {LM_EVAL}:hellaswag"
            )
        task = f"{LM_EVAL}:{name}"
        options = build(HarnessOptions, task, parse_options(task, rest, OPTION) if comma else {}, OPTION)
        for key, least in (("fewshot", 0), ("samples", 1)):
            if (value := getattr(options, key)) is not None and value < least:
                raise UserError(f"{OPTION} {spec}: {key}={value} is too few; give {least} or more")
        need(f"{OPTION} {LM_EVAL}:NAME", "lm_eval")
        if options.samples is None:
            options = options.model_copy(update={"samples": samples})
        return cls(spec, name, options, include_path, continue_texts)

    def check(self, source: OpenedRun) -> None:
        """UserError for an encoder, an unknown task, data that cannot be loaded, or a task that the model cannot do."""
        if not source.config.model.is_causal:
            kind = source.config.model.kind
            raise UserError(
                f"{OPTION} {self.spec}: model.kind={kind} of {source.folder} does not continue text; "
                "give a run of a causal_lm"
            )
        manager = self._manager()
        for data_set, place in sorted(set(_hub_data_sets(manager, self.name))):
            reason = None if place.exists() else unreachable(data_set, "dataset")
            if reason is not None:
                raise UserError(self._unloadable(f"{data_set} is not in {place.parent}, and {reason}"))
        try:
            self._loaded = manager.load([self.name])
        except Exception as error:  # of the hub, of files, of a task's own code
            raise UserError(self._unloadable(f"{type(error).__name__}: {first_line(error)}")) from None
        for name, task in self._loaded["tasks"].items():
            self._check_task(name, task)

    def _unloadable(self, reason: str) -> str:
        return (
            f"{OPTION} {self.spec}: its data cannot be loaded ({reason}); run it where huggingface.co can be "
            "reached, or set HF_HOME to a folder into which that was done"
        )

    def _manager(self) -> "TaskManager":
        """The index of tasks; of the own ones alone if they have the name, as reading the others takes seconds."""
        path = None if self.include_path is None else str(self.include_path)
        if path is not None and self.name in _index(path, include_defaults=False).task_index:
            return _index(path, include_defaults=False)
        manager = _index(path, include_defaults=True)
        if self.name not in manager.task_index:
            nearest = nearest_first(self.name, manager.all_tasks, most=3)
            remedy = f"choose {nearest}, or give --include-path DIR of your own"
            raise UserError(f"{OPTION} {self.spec}: the harness has no task {self.name}; {remedy}")
        return manager

    def _check_task(self, name: str, task: Any) -> None:
        """Set the number of examples of one task; UserError for one that this model cannot do."""
        refused = f"{OPTION} {self.spec}: {name}"
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(
                f"{refused} executes code that the model writes, which is not supported; leave it out"
            )
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"{refused} has images or sound, and the model reads text; leave it out")
        if task.OUTPUT_TYPE == "generate_until" and self.continue_texts is None:
            raise UserError(f"{refused} generates text, for which no function was given; leave it out")
        default, given = task.get_config("num_fewshot"), self.options.fewshot
        if given is not None and default == 0 and given != 0:
            raise UserError(f"{refused} always has 0 examples before a question; leave out fewshot={given}")
        if given is not None or default is None:
            task.set_config(key="num_fewshot", value=given or 0)

    def measure(self, subject: LoadedRun, progress: OnPass) -> "HarnessResult":
        """The harness's metrics."""
        from lm_eval import __version__
        from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
        from lm_eval.evaluator import evaluate

        from .harness_model import ScoringModel

        # The seeds of the harness's own command, so that it asks the same questions.
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        model = ScoringModel(subject, progress, self.continue_texts)
        found = evaluate(lm=model, task_dict=self._loaded, limit=self.options.samples, log_samples=False)
        return HarnessResult(
            task=self.spec,
            run=str(subject.folder),
            step=subject.step,
            version=__version__,
            documents={name: count["effective"] for name, count in found["n-samples"].items()},
            fewshot=dict(found["n-shot"]),
            scores=tuple(_scores(found["results"])),
            requests=model.requests,
            shortened=model.shortened,
        )


@cache
def _index(include_path: str | None, include_defaults: bool) -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path, include_defaults=include_defaults)


def _hub_data_sets(manager: "TaskManager", name: str) -> Iterator[tuple[str, Path]]:
    """Data sets of the hub that a task or the tasks of a group read, and where they are once they are loaded."""
    from datasets.config import HF_DATASETS_CACHE

    entry = manager.task_index.get(name)
    config = (entry.cfg if entry is not None else None) or {}
    path = config.get("dataset_path")
    if isinstance(path, str) and "data_files" not in (config.get("dataset_kwargs") or {}):
        yield path, Path(HF_DATASETS_CACHE) / path.replace("/", "___")
    children = config.get("task")
    for child in children if isinstance(children, list) else ():
        if isinstance(child, str):
            yield from _hub_data_sets(manager, child)


@dataclass(frozen=True)
class Score:
    """One metric of one task or group."""

    task: str
    metric: str
    filter: str
    """What the harness did to answers before it compared them; `none`: nothing."""

    value: float
    standard_error: float | None

    @property
    def name(self) -> str:
        """The metric, with its filter if it has one."""
        return self.metric if self.filter == "none" else f"{self.metric} {self.filter}"


def _scores(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Score]:
    """The scores in the harness's `results`: task -> `METRIC,FILTER` -> value, beside `METRIC_stderr,FILTER`."""
    for task, values in results.items():
        for key, value in values.items():
            metric, comma, used = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                error = values.get(f"{metric}_stderr,{used}")
                yield Score(task, metric, used, float(value), error if isinstance(error, float) else None)


@dataclass(frozen=True)
class HarnessResult:
    """A checkpoint's scores in a task of the harness."""

    task: str
    run: str
    step: int

    version: str
    """Of the harness."""

    documents: dict[str, int]
    """Task -> its documents that were used."""

    fewshot: dict[str, int]
    """Task -> examples before each question."""

    scores: tuple[Score, ...]

    requests: int
    """Texts that were scored or continued."""

    shortened: int
    """Those whose beginning was cut off, because they exceed learned positions."""

    def scalars(self) -> dict[str, float]:
        """Metrics, with the task's name before them if there are several tasks."""
        one = len({score.task for score in self.scores}) == 1
        return {
            ("" if one else f"{score.task}/") + score.name.replace(" ", "-"): score.value
            for score in self.scores
        }

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        left_out = ("task", "scores")
        tree = {key: value for key, value in vars(self).items() if key not in left_out}
        return {**tree, "scores": [vars(score) for score in self.scores]}

    def table(self) -> Table:
        """One row per metric."""
        rows = [
            (
                score.task,
                score.name,
                number(score.value),
                number(score.standard_error),
                f"{self.documents[score.task]:,}" if score.task in self.documents else "",
                str(self.fewshot.get(score.task, "")),
            )
            for score in self.scores
        ]
        below: tuple[str, ...] = ()
        if self.shortened:
            below = (
                f"{self.shortened:,} of {self.requests:,} texts lost their beginning to learned positions",
            )
        title = f"{self.task}: {self.run} at step {self.step}, lm-evaluation-harness {self.version}"
        return Table(
            title,
            ("task", "metric", "value", "± (standard error)", "documents", "few-shot"),
            rows,
            below=below,
        )
