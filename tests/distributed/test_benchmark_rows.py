"""Every configuration of the Long Range Arena and GLUE tables trains 20 steps on data in the published format."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experiments.page import result_row
from benchmarks.experiments.runs import RunOptions, StudyResult, make_run
from benchmarks.experiments.study import read_study
from benchmarks.training_runs import best_step
from data_pipeline.papers.generated import GeneratedTask
from megakernel.config import load
from megakernel.evaluation import evaluate_run
from tests import published
from tests.distributed.processes import cpu_mesh, run_ranks
from tests.distributed.training_run import metrics, scalars
from tests.unit.data.conftest import prepared

pytestmark = pytest.mark.second

CONFIGS = Path(__file__).parents[2] / "configs"
STUDIES = {name: read_study(name) for name in ("lra_kl", "lra_skyformer", "glue_kl", "glue_flurka")}
ROWS = sorted(
    [study.config_file(task).resolve() for study in STUDIES.values() for task in study.study.variants]
    + [CONFIGS / "glue" / paper / "pretrain.yaml" for paper in ("kl", "flurka")]
)
NAMES = [f"{path.parents[1].name}-{path.parent.name}-{path.stem}" for path in ROWS]
FINE_TUNED = "glue-kl-rte-tuned"
STEPS = 20
GENERATED_SOURCES = {
    "listops": "lra:listops:train=12,validation=6,test=6,min_length=5,max_length=60",
    "pathfinder": "lra:pathfinder:train=12,validation=6,test=6,contour=4",
}
TOKENIZERS = {"listops": "words", "pathfinder": "pixels", "image": "pixels"}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    """Name of a configuration file -> the prepared folder that it reads."""
    folder = tmp_path_factory.mktemp("published")
    out: dict[str, Path] = {"pretrain": corpus}
    for path in ROWS:
        name, family = path.stem, path.parents[1].name
        if name in out:
            continue
        if name in GENERATED_SOURCES:
            source = GENERATED_SOURCES[name]
        elif family == "lra":
            source = f"lra:{name}:{published.WRITERS[f'lra:{name}'](folder / name)}"
        else:
            source = f"glue:{name}:{published.glue(folder / name, name)}"
        out[name] = folder / f"{name}-prepared"
        prepared(out[name], [source], tokenizer=TOKENIZERS.get(name, "byte"))
    return out


def overrides(path: Path, root: Path, corpora: dict[str, Path]) -> list[str]:
    """Overrides that shrink widths, layers and lengths, but keep the mechanism, head, optimizer and schedule."""
    keys: dict[str, Any] = {
        "run.root": root,
        "data.train": corpora[path.stem],
        "data.num_workers": 0,
        "init.from": "null",
        "model.num_layers": 1,
        "model.head_dim": 8,
        "model.num_heads": 2,
        "model.hidden_size": 16,
        "model.ffn_hidden_size": 16,
        "model.vocab_multiple": 1,
        "training.steps": STEPS,
        "training.seq_len": 16,
        "training.global_batch_size": 2,
        "training.micro_batch_size": 2,
        "training.log_every": 1,
        "training.eval_samples": 4,
        "training.device": "cpu",
        "logging.tensorboard": "false",
    }
    if path.parent.name == "flurka":
        keys["model.attention.compression.rank"] = 4
    return [f"{key}={value}" for key, value in keys.items()]


def train_rows(rows: list[tuple[str, Path, list[str]]]) -> dict[str, list[str]]:
    """Train the runs one after the other in this rank; name -> the trainer's notes, or its error."""
    from launch.training import providers
    from megakernel.training.trainer import Trainer

    notes: dict[str, list[str]] = {}

    class NoteRecorder(Trainer):
        def _note(self, text: str) -> None:
            notes[self.config.run.name].append(text)

    with cpu_mesh() as mesh:
        for name, path, keys in rows:
            notes[name] = []
            try:
                NoteRecorder(load(path, [*keys, f"run.name={name}"]), mesh, providers()).run()
            except Exception as error:  # so that the other rows still run
                notes[name] = [f"error: {type(error).__name__}: {error}"]
    return notes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def notes(root: Path, corpora: dict[str, Path]) -> dict[str, list[str]]:
    """Notes of all rows, and of a task that is fine-tuned from the weights of the masked language model."""
    rows = [(name, path, overrides(path, root, corpora)) for name, path in zip(NAMES, ROWS)]
    rows.sort(key=lambda row: "pretrain" not in row[0])
    tuned = CONFIGS / "glue" / "kl" / "rte.yaml"
    source = f"init.from={root / 'glue-kl-pretrain'}"
    rows.append((FINE_TUNED, tuned, [*overrides(tuned, root, corpora), source]))
    return run_ranks(train_rows, 1, rows, timeout=280.0)[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_row_trains_all_its_steps(name: str, notes: dict[str, list[str]], root: Path):
    assert not [note for note in notes[name] if note.startswith("error")]
    lines = metrics(root / name)
    losses = scalars(lines, "train/loss")
    assert len(losses) == STEPS
    assert all(
        map(math.isfinite, [*losses, *scalars(lines, "train/grad_norm"), *scalars(lines, "eval/loss")])
    )
    assert not any(scalars(lines, "train/skipped_steps"))
    has_classes = not name.endswith(("pretrain", "stsb"))
    assert len(scalars(lines, "eval/accuracy")) == (2 if has_classes else 0)


def test_every_task_has_a_row():
    from data_pipeline.papers.tasks import GENERATED, PUBLISHED

    tasks = {f"{path.parents[1].name}:{path.stem}" for path in ROWS if path.stem != "pretrain"}
    # sparsity is a study of its own; no paper has the mails.
    assert tasks == {*GENERATED, *PUBLISHED} - {"sparsity", "lra:spam"}
    assert issubclass(GENERATED["lra:listops"], GeneratedTask)


def test_fine_tuning_loads_the_encoder_and_initializes_a_new_head(notes: dict[str, list[str]]):
    [new] = [note for note in notes[FINE_TUNED] if "new here" in note]
    names = new.partition(": ")[2].split(", ")
    assert [name.partition(".")[2] for name in names] == [
        "inner.bias",
        "inner.weight",
        "output.bias",
        "output.weight",
    ]
    assert not [note for note in notes[FINE_TUNED] if "left out" in note]


def test_a_regression_task_is_scored_by_correlations(notes: dict[str, list[str]], root: Path):
    evaluation = evaluate_run(root / "glue-kl-stsb")
    assert evaluation.accuracy is None
    assert evaluation.scores is not None
    assert set(evaluation.scores) == {"pearson", "spearman"}
    assert evaluation.loss == pytest.approx(
        scalars(metrics(root / "glue-kl-stsb"), "eval/loss")[-1], rel=1e-5
    )


def test_the_table_evaluates_finished_runs_on_the_test_split(
    notes: dict[str, list[str]], root: Path, corpora: dict[str, Path]
):
    study = STUDIES["lra_skyformer"]
    keys = overrides(study.config_file("listops"), root, corpora)
    run = make_run(study, "as configured", "listops", 0, RunOptions(keys))
    folder = root / "lra-skyformer-listops"
    result = StudyResult(run, "skyformer", run.config, folder, best_step(folder), {}, {}, 1)
    evaluation = result.evaluations["test"]
    assert (evaluation["split"], evaluation["samples"], evaluation["step"]) == ("test", 6, STEPS)
    titles = ("attention", "runs", "accuracy", "loss", "steps")
    accuracy, loss = evaluation["accuracy"], evaluation["loss"]
    row = result_row(study, [result, result], [result], titles)
    assert row == f"| `skyformer` | 2 | {accuracy:.4f} ± 0.0000 | {loss:.4f} ± 0.0000 | {STEPS} |"


def test_evaluating_a_missing_split_is_refused(notes: dict[str, list[str]], root: Path):
    with pytest.raises(
        ValueError, match=r"data\.train=.*text-prepared has no test split; prepare it with one"
    ):
        evaluate_run(root / "lra-kl-text", split="test")
