"""`megakernel analyze` of a real run with several mechanisms: tables, plots and TensorBoard."""

import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launch.cli import main
from megakernel.analysis.plots import subject
from megakernel.analysis.plots.subject import captured_attention
from megakernel.checkpoint.files import CheckpointTensors
from megakernel.checkpoint.trained_run import TrainedRun
from megakernel.checkpoint.whole_tensors import WEIGHT
from tests.csv_tables import from_csv
from tests.distributed.training_run import train, write_config

pytestmark = pytest.mark.second

LENGTH = 64
APPLICABLE = {
    "attention",
    "claims",
    "covariances",
    "flurka_error",
    "gates",
    "gradients",
    "instability",
    "kernel_deviation",
    "key_weights",
    "keys",
    "mixing",
    "mixture_costs",
    "query_likelihood",
    "ranks",
    "singular_values",
    "span",
    "spectral_error",
    "statistical_dimension",
    "voting",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    config = write_config(tmp_path_factory.mktemp("runs"), corpus)
    layers = "[gmm_prf, {preset: flurka, compression: {block_size: 16, rank: 4}}, mgk]"
    sizes = ("model.num_layers=3", "model.hidden_size=32", f"training.seq_len={LENGTH}")
    train(config, 1, "training.steps=2", "checkpoint.every=1", *sizes, f"model.attention_pattern={layers}")
    return config.parent / "run"


def analyze(run, *options):
    return main(["analyze", str(run), "--samples", "2", "--draws", "4", "--what", *options])


def rows(folder, name):
    return from_csv((folder / f"{name}.csv").read_text())


@pytest.fixture(scope="module")
def analyzed(run):
    assert analyze(run, "all") == 0
    return run / "analysis" / "step_2"


def test_every_applicable_analysis_writes_a_table_and_plots(analyzed):
    assert {path.stem for path in analyzed.glob("*.csv")} == APPLICABLE
    for name in APPLICABLE:
        assert rows(analyzed, name)
        plots = list(analyzed.glob(f"{name}_*.png"))
        assert plots
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)
    assert not list(analyzed.glob("*partial*"))


def test_tables_describe_the_checkpoint(run, analyzed):
    """Eigenvalues are the variances in its files; rows of causal attention sum to 1 and see no later keys."""
    tensors = CheckpointTensors(TrainedRun.find(run).checkpoint)
    name = next(name for name in tensors.names if name.endswith("core.projection.log_variance"))
    variances = tensors.read(name, [WEIGHT])[WEIGHT].double().exp()
    eigenvalues = [row["eigenvalue"] for row in rows(analyzed, "covariances")]
    torch.testing.assert_close(
        torch.tensor(eigenvalues, dtype=torch.float64),
        variances.sort(-1, descending=True).values.flatten(),
        rtol=1e-5,
        atol=0,
    )
    weight_sums = {}
    for row in rows(analyzed, "attention"):
        assert row["key"] <= row["query"] < LENGTH
        query = (row["layer"], row["head"], row["query"])
        weight_sums[query] = weight_sums.get(query, 0.0) + row["weight"]
    assert len(weight_sums) == 3 * 4 * LENGTH
    assert list(weight_sums.values()) == pytest.approx([1.0] * len(weight_sums), rel=1e-3)
    assert [row["draws"] for row in rows(analyzed, "voting")] == [1, 2, 4]
    # Gates start at 0.95; two steps change them little.
    assert all(0.9 < row["gate"] < 0.99 for row in rows(analyzed, "gates"))
    assert {row["layer"] for row in rows(analyzed, "query_likelihood")} == {2}


def test_tensorboard_has_each_plot_once_at_its_step(run, analyzed):
    assert analyze(run, "span", "ranks") == 0
    assert analyze(run, "span", "--step", "1") == 0
    reader = EventAccumulator(str(run / "analysis"), size_guidance={"images": 0})
    reader.Reload()
    tags = reader.Tags()["images"]
    assert {tag.split("/")[1] for tag in tags} == APPLICABLE
    assert all(tag.startswith("plots/") for tag in tags)
    assert sorted(image.step for image in reader.Images("plots/span/span")) == [1, 2]
    assert [image.step for image in reader.Images("plots/ranks/rank")] == [2]


def test_with_out_the_results_go_elsewhere_and_the_run_is_unchanged(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("analysis"))
    before = sorted(path for path in copy.rglob("*"))
    assert analyze(copy, "span", "--out", str(tmp_path / "out"), "--seq-len", "32") == 0
    assert sorted(path for path in copy.rglob("*")) == before
    printed = capsys.readouterr().out
    assert "span.csv" in printed
    assert all(row["span"] < 32 for row in rows(tmp_path / "out", "span"))


def test_checkpoints_of_given_accuracies_are_analyzed_one_after_another(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("analysis"))
    with (copy / "metrics.jsonl").open("a") as file:  # as a classifier's
        for step, accuracy in ((1, 0.3), (2, 0.7)):
            file.write(f'{{"step": {step}, "eval/accuracy": {accuracy}}}\n')
    levels = ("--at-accuracy", "0.2", "0.3", "0.6")
    assert analyze(copy, "gradients", "--out", str(tmp_path / "out"), *levels) == 0
    printed = capsys.readouterr().out
    assert printed.index("accuracy 0.2, 0.3: step 1") < printed.index("accuracy 0.6: step 2")
    assert "absolute_mean, min" in printed
    early, late = (rows(tmp_path / "out" / f"step_{step}", "gradients") for step in (1, 2))
    assert len(early) == len(late) == 32
    assert early != late


@pytest.mark.parametrize(
    ("options", "explanation"),
    [
        (("span", "--at-accuracy", "0.5"), "give the checkpoint with --step"),
        (("span", "--at-accuracy", "0.5", "--step", "1"), "leave out one of them"),
        (
            ("span", "--at-accuracy", "50"),
            "50 is out of range; give a finite number of at least 0 and of at most 1",
        ),
        (("spectra",), "--what spectra is no analysis; choose all, attention"),
        (("span", "--step", "7"), "choose one of 1, 2"),
        (("span", "--seq-len", "5000"), "give --seq-len 4096 or less"),
        (("span", "--samples", "0"), "give --samples 1 or more"),
        (("voting", "--draws", "1"), "give --draws 2 or more"),
        (
            ("gates", "--seq-len", "8"),
            "--what gates: sequences of 8 tokens show nothing of it; give a larger --seq-len",
        ),
    ],
)
def test_invalid_options_are_refused_in_one_line_with_the_remedy(
    run, options, explanation, tmp_path, refused
):
    assert explanation in refused("analyze", run, "--what", *options, "--out", tmp_path)


def test_an_analysis_takes_one_pass_per_sample_after_a_first_one(run, tmp_path, monkeypatch):
    passes = []

    def counted(*args):
        passes.append(args)
        return captured_attention(*args)

    monkeypatch.setattr(subject, "captured_attention", counted)
    assert main(["analyze", str(run), "--samples", "4", "--what", "span", "--out", str(tmp_path)]) == 0
    assert len(passes) == 1 + 4


def test_no_table_is_written_of_numbers_that_are_not_finite_in_a_later_sample(
    run, tmp_path, monkeypatch, refused
):
    passes = []

    def diverging(*args):
        passes.append(args)
        captured = captured_attention(*args)
        if len(passes) == 3:
            captured[1].output.fill_(torch.inf)
        return captured

    monkeypatch.setattr(subject, "captured_attention", diverging)
    error = refused("analyze", run, "--samples", "4", "--what", "span", "--out", tmp_path)
    assert "the numbers of layer 1's attention are not finite; give an earlier one with --step" in error
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_has_diverged_is_refused_in_one_line(corpus, tmp_path, refused):
    config = write_config(tmp_path, corpus)
    wild = (
        "training.steps=2",
        "optimizer.lr=1e18",
        "model.attention=softmax",
        "model.attention_pattern=null",
    )
    train(config, 1, *wild)
    error = refused("analyze", tmp_path / "run", "--what", "ranks", "--out", tmp_path / "out")
    run = tmp_path / "run"
    assert f"in the checkpoint of step 2 of {run} the numbers of layer 0's attention are not finite" in error
