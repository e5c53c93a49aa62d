"""The keys of a study's YAML file, and reading one: unknown keys and measures are refused by file and key."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.training_runs import preset_tree, with_small_blocks
from megakernel.config import Config, ConfigError, Problem
from megakernel.config.errors import nearest_first
from megakernel.config.load import read_composed
from megakernel.config.section import Section
from megakernel.config.validation import validate_section

from .checks import CHECKS
from .measures import MEASURES, Against, FlopsToLoss, Measure, OfTask

FOLDER = Path(__file__).parent
Overrides = dict[str, Any]
"""Dotted key of a configuration -> value."""


class StudyData(Section):
    """What `megakernel prepare` makes; an existing folder is used as it is. Texts may have `{names}`, see `Study`."""

    source: str
    """`--source`."""

    tokenizer: str = "byte"
    """`--tokenizer`."""

    options: dict[str, str | float] = Field({})
    """Other options, without their dashes: `validation-fraction: 0.1`."""

    out: str | None = None
    """`--out`, which becomes data.train; null: the configured data.train."""

    made_by: str | None = None
    """Module with `--out FOLDER` that makes the folder of the file `source` if it does not exist."""

    example_tokens: int | None = None
    """Tokens of an example, for `{examples}`; null: an example fills a sequence."""

    extra_steps: int = 0
    """Steps that read examples besides the configured ones, for `{examples}`: of `start` and of attention transfer."""


class BlockSizes(Section):
    """Sizes for short sequences, for every preset that has them."""

    block_size: int
    """Tokens of a block, or of a window of windows alone."""

    rank: int
    """Landmarks of a block."""

    sequence_rank: int
    """Landmarks of a whole sequence, where the preset has no blocks."""


class Variant(Section):
    """A setting in which every model is trained."""

    config: Path | None = None
    """Instead of the study's."""

    overrides: Overrides = Field({})
    """Overrides of every model, after the study's."""

    models: dict[str, Overrides] = Field({})
    """Overrides of single models, after their own."""


class Scatter(Section):
    """A plot of the table's rows: a panel for each variant, and one of the means over variants of models in all."""

    x: str
    """Column of the horizontal axis."""

    y: str
    """Column of the vertical axis."""

    size: str
    """Column that areas of points are proportional to; with a dash before it, inversely."""

    @property
    def inverse(self) -> bool:
        """Whether a small number is a large point."""
        return self.size.startswith("-")

    @property
    def columns(self) -> list[str]:
        """The titles of the columns of x, y and size."""
        return [self.x, self.y, self.size.removeprefix("-")]


class StudyStart(Section):
    """The trained model that all others are up-trained from; `init` and `training.skip_samples` are set for it."""

    name: str = "dense"
    """Its name in the table, and of its run if `model` is null."""

    study: str | None = None
    """The study that trains it; null: this one."""

    model: str | None = None
    """The name of the model there; null: as configured."""

    config: Path | None = None
    """Instead of that study's."""

    overrides: Overrides = Field({})
    """Overrides after that study's."""

    export: bool = False
    """Up-train from the folder of `megakernel export`, as people do with a model of `transformers`."""


class Study(Section):
    """One study.

    `run` and the texts of `data` and `tasks` may have {name} (the model's), {variant}, {seed}, {seq_len}; {samples}:
    evaluated_tokens over seq_len; {examples}: so many of `data` that no step repeats one, held-out ones included;
    tasks also {split}: test, or validation where the data have no test split. `text` may have keys of the first model's
    configuration, as {training.steps:,}; {tokens}, the tokens that it reads; {start.KEY} and {start_tokens}, the same
    of `start`; and {examples}, {samples} and {split}.
    """

    title: str
    """Title of the page."""

    text: str
    """What stands above the table: what is trained, on what, and what the columns are."""

    config: Path
    """Configuration file, relative to the study's."""

    overrides: Overrides = Field({})
    """Overrides of every model."""

    data: StudyData | None = None
    """null: the configured data have to be there."""

    blocks: BlockSizes | None = None
    """Smaller blocks for the models' presets."""

    presets: list[str] = Field([])
    """Models of model.attention: PRESET[+PART...], with that name."""

    models: dict[str, Any] = Field({})
    """Other models: name -> PRESET[+PART...], a list of them (a layer each), or overrides."""

    only: list[str] = Field([])
    """Models that are measured without --only; empty: all of them."""

    variants: dict[str, Variant] = Field({"": Variant()})
    """Name -> setting; without --variants the first one is measured, or all of them with `all_variants`."""

    all_variants: bool = False
    """Whether all variants are measured without --variants."""

    seeds: list[int] = Field([0])
    """Numbers added to the configured run.seed."""

    mean_over_seeds: bool = False
    """One row for all seeds of a model: means with sample standard deviations."""

    start: StudyStart | None = None
    """null: models start from random weights (`megakernel pretrain`)."""

    rows: list[str] = Field(default=["start", "main"], min_length=1)
    """Rows of an up-training: start, swapped, stages (transfer, base, rank, main, scratch, dense), ablations."""

    run: str = "{name}-{variant}-{seed}"
    """Name of a model's run in runs/STUDY; empty parts are left out."""

    checkpoint: str = Field(default="last", pattern="^(last|best)$")
    """Evaluated checkpoint: the last one, or the one that was best on validation data."""

    evaluated_tokens: int = 0
    """Tokens of an evaluation, for {samples}."""

    tasks: dict[str, str] = Field({})
    """Name -> `megakernel evaluate --task`."""

    columns: dict[str, Any]
    """Title -> measure (see `measures.py`): its name, or `measure: NAME` and its keys."""

    sort: list[str] = Field([])
    """Columns by which rows are sorted; a dash before one sorts the largest first."""

    correlations: list[tuple[str, str]] = Field([])
    """Pairs of columns whose R² over the runs of a variant stands below the table."""

    checks: list[str] = Field([])
    """What must hold before a page is written: names in `checks.py`."""

    curves: str | None = None
    """Metric whose curves are written next to the page, as CSV and PNG."""

    scatter: Scatter | None = None
    """Columns that are drawn against each other next to the page, as PAGE_scatter.png."""

    nproc: int = 1
    """Processes of a training run."""

    environment: dict[str, str] = Field({})
    """Environment variables of training runs."""


class LoadedStudy:
    """A study, with its measures read."""

    def __init__(self, name: str, file: Path, study: Study, columns: dict[str, Measure]):
        self.name, self.file, self.study, self.columns = name, file, study, columns
        self.models: dict[str, Any] = {**{preset: preset for preset in study.presets}, **study.models}

    def config_file(self, variant: str) -> Path:
        """The configuration file of a variant."""
        setting = self.study.variants[variant]
        return self.path(setting.config or self.study.config)

    def path(self, path: Path) -> Path:
        """A path that the file names, relative to it."""
        return self.file.parent / path

    def model_overrides(self, model: str, variant: str) -> Overrides:
        """The overrides of one model in one variant."""
        entry, setting = self.models[model], self.study.variants[variant]
        keys = dict(entry) if isinstance(entry, dict) else {_key(entry): entry}
        for key in ("model.attention", "model.attention_pattern"):
            if key in keys:
                keys[key] = self._attention(keys[key])
        return keys | setting.models.get(model, {})

    def fill(self, text: str, names: Mapping[str, Any]) -> str:
        """A text of the study with `{names}` filled in. Raises ConfigError for an unknown one."""
        try:
            return text.format_map(names)
        except (KeyError, AttributeError, IndexError, ValueError, TypeError) as error:
            known = ", ".join(sorted(names))
            problem = Problem(str(self.file), text, f"cannot be filled in ({error})", f"known names: {known}")
            raise ConfigError([problem]) from None

    def examples(self, config: Config) -> int:
        """Number of examples of `data`: so many that no step of a run with this configuration repeats one."""
        data, training = self.study.data, config.training
        assert data is not None
        longer = 1 + data.extra_steps / training.steps
        samples, tokens = (count * longer for count in training.consumed(training.steps))
        examples = tokens / data.example_tokens if data.example_tokens else samples
        held_out = float(data.options.get("validation-fraction", 0.0))
        return int((examples + 1) / (1 - held_out) * 1.02) + 100

    def _attention(self, value: Any) -> Any:
        """An attention section, or a list of them, with its preset's parts and the study's blocks."""
        if isinstance(value, list):
            return [self._attention(layer) for layer in value]
        if not isinstance(value, str | dict):
            raise ValueError("write PRESET[+PART...], a list of them, or a mapping of overrides")
        name = value if isinstance(value, str) else value.get("preset", "")
        more = {} if isinstance(value, str) else {key: item for key, item in value.items() if key != "preset"}
        if not name:
            return more
        blocks = self.study.blocks
        tree = preset_tree(name) if blocks is None else with_small_blocks(name, **blocks.model_dump())
        return {**tree, **more}


def _key(entry: Any) -> str:
    return "model.attention_pattern" if isinstance(entry, list) else "model.attention"


def names() -> list[str]:
    """All studies of this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_study(name: str) -> LoadedStudy:
    """The study of this name, or in a YAML file. Raises ConfigError with file, key and remedy for what is wrong."""
    file = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(
            [Problem("", name, "is no study", f"choose {nearest_first(name, names(), most=5)}")]
        )
    tree = read_composed(file)
    try:
        if isinstance(variants := tree.get("variants"), dict):
            kinds = {name: value or {} for name, value in variants.items()}
            tree["variants"] = {
                name: validate_section(Variant, value, f"variants.{name}") for name, value in kinds.items()
            }
        study = validate_section(Study, tree)
        loaded = LoadedStudy(file.stem, file, study, _measures(study.columns))
        if problems := list(_unknown_names(loaded)):
            raise ConfigError(problems)
    except ConfigError as error:
        raise ConfigError([replace(x, key=f"{file}: {x.key}") for x in error.problems]) from None
    return loaded


def _unknown_names(loaded: LoadedStudy) -> Iterator[Problem]:
    """Problems of names that stand for nothing in the study."""
    study = loaded.study
    used: list[tuple[str, Iterable[str], Iterable[str]]] = [
        ("only", study.only, loaded.models),
        ("correlations", chain.from_iterable(study.correlations), study.columns),
        ("scatter", [] if study.scatter is None else study.scatter.columns, study.columns),
        ("checks", study.checks, CHECKS),
        ("sort", [title.removeprefix("-") for title in study.sort], study.columns),
    ]
    for name, variant in study.variants.items():
        used.append((f"variants.{name}.models", variant.models, loaded.models))
    for title, column in loaded.columns.items():
        used.append((f"columns.{title}.of", [column.of] if isinstance(column, OfTask) else (), study.tasks))
        if isinstance(column, Against | FlopsToLoss):
            used.append((f"columns.{title}.baseline", [column.baseline], loaded.models))
    for key, found, known in used:
        for item in found:
            if item not in known:
                yield Problem(key, item, "is unknown", f"choose {nearest_first(item, known)}")
    for model, variant in product(loaded.models, study.variants):
        try:
            loaded.model_overrides(model, variant)
        except ValueError as error:
            yield Problem(f"models.{model}", loaded.models[model], "cannot be read", str(error))


def _measures(columns: Mapping[str, Any]) -> dict[str, Measure]:
    """Title -> measure. Raises ConfigError with the problems of all columns."""
    found, problems = {}, []
    for title, entry in columns.items():
        try:
            found[title] = _measure(entry, f"columns.{title}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return found


def _measure(entry: Any, key: str) -> Measure:
    keys = {"measure": entry} if isinstance(entry, str) else entry
    if not isinstance(keys, dict) or "measure" not in keys:
        raise ConfigError([Problem(key, entry, "names no measure", f"write measure: {', '.join(MEASURES)}")])
    name = keys["measure"]
    if name not in MEASURES:
        remedy = f"choose {nearest_first(str(name), MEASURES)}"
        raise ConfigError([Problem(f"{key}.measure", name, "is no measure", remedy)])
    return validate_section(MEASURES[name], keys, key)
