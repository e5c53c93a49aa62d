"""What wandb and Trackio get of a run, with the libraries themselves, which need no server for it."""

import json
import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import wandb
from matplotlib.figure import Figure

from megakernel.config import Config, ConfigError
from megakernel.training.observing.histograms import SHARES, SIGNED, Histogram
from megakernel.training.observing.metrics_writer import MetricsWriter, StepMetrics
from megakernel.training.observing.trackers import KEPT, Trackers, buckets, tracked_name
from tests.tracked import trackio_history, wandb_history, wandb_records, wandb_runs


@pytest.fixture(autouse=True)
def own_account(tmp_path, monkeypatch):
    """No key and no settings of the person who runs the tests; wandb reads both once per process, or teardown."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def project(tmp_path) -> str:
    """A project of the test's own: all tests share Trackio's database."""
    return tmp_path.name


def config_of(folder: Path, **logging) -> Config:
    return Config.model_validate(
        {
            "run": {"name": folder.name, "root": str(folder.parent)},
            "model": {"num_layers": 1, "hidden_size": 8, "num_heads": 2},
            "data": {"train": "corpus"},
            "training": {"steps": 5, "seq_len": 16, "global_batch_size": 1},
            "logging": logging,
        }
    )


def offline(project: str, **more) -> dict:
    return {"project": project, "mode": "offline", **more}


def train(folder: Path, lines: list[str], done: int, until: int, offset: float = 0.0, **logging) -> None:
    """Write losses of steps done + 1 to until, as a process of the run that resumes from `done`."""
    folder.mkdir(exist_ok=True)
    trackers = Trackers(config_of(folder, **logging), folder, lines.append)
    with MetricsWriter(folder / "metrics.jsonl", None, done, trackers) as writer:
        for step in range(done + 1, until + 1):
            writer.write(step, StepMetrics({"train/loss": step + offset}))


LOSSES = [(1, 1.0), (2, 2.0), (3, 3.0), (3, 3.5), (4, 4.5)]
"""(step, loss) of a run that went back to step 2 after step 3: trackers cannot take points back."""


def test_a_resumed_run_continues_its_wandb_run(tmp_path, project):
    folder, lines = tmp_path / "first", []
    train(folder, lines, 0, 3, wandb=offline(project, tags=["a"]))
    train(folder, lines, 2, 4, offset=0.5, wandb=offline(project, tags=["a"]))
    assert [(line["step"], line["train/loss"]) for line in wandb_history(folder)] == LOSSES
    one, two = wandb_runs(folder)
    assert one.run_id == two.run_id
    assert {(run.project, run.display_name, run.run_group, *run.tags) for run in (one, two)} == {
        (project, "first", "first", "a")
    }
    config = {item.key: json.loads(item.value_json) for item in one.config.update}
    assert config["training"]["seq_len"] == 16
    axes = [record.metric for record in wandb_records(folder) if record.HasField("metric")]
    assert [(axis.glob_name, axis.step_metric) for axis in axes if axis.step_metric] == [("*", "step")] * 2
    assert lines == [f"wandb: offline; `wandb sync {folder / 'wandb'}` uploads it"] * 2


def test_a_resumed_run_continues_its_trackio_run(tmp_path, project, capsys):
    from trackio.sqlite_storage import SQLiteStorage

    folder, lines = tmp_path / "first", []
    train(folder, lines, 0, 3, trackio={"project": project})
    train(folder, lines, 2, 4, offset=0.5, trackio={"project": project})
    assert [(line["step"], line["train/loss"]) for line in trackio_history(project, "first")] == LOSSES
    assert SQLiteStorage.get_runs(project) == ["first"]
    assert SQLiteStorage.get_run_config(project, "first")["training.seq_len"] == 16
    assert len(lines) == 2
    assert lines[0].endswith(f'`trackio show --project "{project}"` shows it')
    assert capsys.readouterr().out == ""


def test_another_project_is_another_run(tmp_path, project):
    folder, lines = tmp_path / "first", []
    for name in (project, f"{project}-b"):
        train(folder, lines, 0, 1, wandb=offline(name), trackio={"project": name})
    one, two = wandb_runs(folder)
    assert one.run_id != two.run_id
    for name in (project, f"{project}-b"):
        assert [line["step"] for line in trackio_history(name, "first")] == [1]


def test_runs_of_one_name_in_two_folders_stay_two_runs_in_trackio(tmp_path, project):
    from trackio.sqlite_storage import SQLiteStorage

    folders, lines = [tmp_path / root / "first" for root in ("a", "b")], []
    for folder in folders:
        folder.parent.mkdir()
        train(folder, lines, 0, 1, trackio={"project": project})
    assert len(SQLiteStorage.get_run_records(project)) == 2
    # The library continues the newest run of a name, which is the second folder's.
    lines.clear()
    train(folders[0], lines, 1, 2, trackio={"project": project})
    assert lines == [
        "warning: logging.trackio ends here, the run goes on: ValueError: project "
        f"{project} has a newer run named first, which is not this one's; rename one of them there"
    ]
    train(folders[1], lines, 1, 2, trackio={"project": project})
    assert [line["step"] for line in trackio_history(project, "first")] == [1, 2]


def test_a_database_without_the_run_gets_a_new_one_and_a_line(tmp_path, project):
    import trackio

    folder, lines = tmp_path / "first", []
    train(folder, lines, 0, 1, trackio={"project": project})
    assert trackio.delete_project(project, force=True)
    train(folder, lines, 1, 2, trackio={"project": project})
    assert lines[1] == f"logging.trackio: project {project} has no run first any more; a new one begins"
    assert [line["step"] for line in trackio_history(project, "first")] == [2]


def test_histograms_plots_and_samples_arrive_as_such(tmp_path, project):
    histogram, figure, lines = Histogram(), Figure(), []
    histogram.add(torch.tensor([0.01, 0.01, 0.99]), SHARES)
    figure.subplots().plot([1, 2])
    entry = StepMetrics(
        {"x": math.nan}, {"gates/0": histogram}, {"analysis/a": figure}, {"samples": "a <b> *c*"}
    )
    trackers = Trackers(
        config_of(tmp_path, wandb=offline(project), trackio={"project": project}), tmp_path, lines.append
    )
    trackers.write(7, entry)
    trackers.close(failed=False)
    assert not [line for line in lines if "warning" in line]
    (shown,) = wandb_history(tmp_path)
    assert (shown["step"], math.isnan(shown["x"])) == (7, True)
    assert (shown["gates/0._type"], sum(shown["gates/0.values"])) == ("histogram", 3)
    assert (shown["analysis/a._type"], shown["samples._type"]) == ("image-file", "html-file")
    (files,) = tmp_path.glob("wandb/offline-run-*/files")
    assert (files / shown["analysis/a.path"]).read_bytes().startswith(b"\x89PNG")
    assert "a &lt;b&gt; *c*" in (files / shown["samples.path"]).read_text()
    (shown,) = trackio_history(project, tmp_path.name)
    assert (shown["step"], shown["gates/0"]["_type"]) == (7, "trackio.histogram")
    assert sum(shown["gates/0"]["values"]) == 3
    assert shown["analysis/a"]["_type"] == "trackio.image"
    assert shown["samples"] == {"_type": "trackio.markdown", "_value": "a <b> *c*"}


@pytest.mark.parametrize("spread", [0.1, 15.0])
def test_histograms_keep_all_counts_in_at_most_512_buckets(spread, draw):
    histogram = Histogram()
    histogram.add(torch.randn(20_000, generator=draw).mul(spread).exp(), SIGNED)
    histogram.add(-torch.randn(20_000, generator=draw).mul(spread).exp(), SIGNED)
    counts, edges = buckets(histogram)
    assert sum(counts) == 40_000
    assert len(edges) == len(counts) + 1 <= 513
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (min(histogram.counts)[0], max(histogram.counts)[1])
    limits, fine = histogram.limits_and_counts()
    assert (len(fine) > 512) == (spread > 1)
    for edge, below in zip(edges[1:], torch.tensor(counts).cumsum(0).tolist()):
        assert below == sum(count for limit, count in zip(limits, fine) if limit <= edge)


def test_without_a_key_wandb_writes_offline_and_says_so(tmp_path, project):
    lines: list[str] = []
    train(tmp_path, lines, 0, 1, wandb={"project": project})
    assert lines == [
        "logging.wandb: no API key, which `wandb login` stores; it writes offline",
        f"wandb: offline; `wandb sync {tmp_path / 'wandb'}` uploads it",
    ]
    assert [line["step"] for line in wandb_history(tmp_path)] == [1]


def test_the_environment_chooses_the_mode_unless_the_configuration_does(tmp_path, project, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    lines: list[str] = []
    train(tmp_path, lines, 0, 1, wandb={"project": project})
    assert lines == ["wandb: disabled"]
    train(tmp_path, lines, 0, 1, wandb=offline(project))
    assert [line["step"] for line in wandb_history(tmp_path)] == [1]


@pytest.mark.second  # wandb retries for seconds
@pytest.mark.parametrize(
    ("key", "why"), [("0" * 40, "CommError: "), ("short", "AuthenticationError: WANDB_API_KEY invalid")]
)
def test_a_server_that_does_not_answer_costs_one_line_and_no_metrics(
    tmp_path, project, monkeypatch, key, why
):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    lines: list[str] = []
    train(tmp_path, lines, 0, 1, wandb={"project": project})
    assert len(lines) == 2
    assert lines[0].startswith(f"logging.wandb: {why}")
    assert lines[0].endswith("; it writes offline")
    assert [line["step"] for line in wandb_history(tmp_path)] == [1]


def test_a_tracker_that_fails_is_reported_once_and_the_run_goes_on(tmp_path, project):
    folder, lines = tmp_path / "first", []
    train(folder, lines, 0, 3, trackio={"project": "registry-x"}, wandb=offline(project))
    assert [line["step"] for line in wandb_history(folder)] == [1, 2, 3]
    (warning,) = (line for line in lines if "warning" in line)
    assert warning.startswith("warning: logging.trackio ends here, the run goes on: ValueError: Project name")
    written = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert written == [1, 2, 3]


def test_a_tracker_whose_process_dies_does_not_end_the_run(tmp_path, project):
    lines: list[str] = []
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    trackers = Trackers(config_of(tmp_path, wandb=offline(project)), tmp_path, lines.append)
    with MetricsWriter(tmp_path / "metrics.jsonl", None, 0, trackers) as writer:
        writer.write(1, StepMetrics({"train/loss": 1.0}))
        for child in psutil.Process().children(recursive=True):
            if child.pid not in before:
                child.kill()
        for step in range(2, 20):
            writer.write(step, StepMetrics({"train/loss": 1.0}))
    with suppress(OSError):  # the library's own end misses its process, too
        wandb.teardown()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 19
    assert [line.partition(":")[0] for line in lines] == ["wandb", "warning"]


def test_damaged_names_of_earlier_runs_are_reported_with_their_file(tmp_path, project):
    (tmp_path / KEPT).write_text("{")
    lines: list[str] = []
    train(tmp_path, lines, 0, 1, trackio={"project": project})
    (line,) = lines
    assert str(tmp_path / KEPT) in line


def test_stages_are_named_and_grouped_by_their_up_training(tmp_path, project):
    lines: list[str] = []
    config = config_of(tmp_path, wandb=offline(project))
    Trackers(config, tmp_path, lines.append, name="up/1-transfer").close(failed=True)
    (run,) = wandb_runs(tmp_path)
    assert (run.display_name, run.run_group, tracked_name(tmp_path)) == (
        "up/1-transfer",
        "up",
        "up/1-transfer",
    )
    (end,) = (record.exit for record in wandb_records(tmp_path) if record.HasField("exit"))
    assert end.exit_code == 1


def test_without_trackers_nothing_is_imported_or_written(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from megakernel.config import load\n"
        "from megakernel.training.observing.trackers import Trackers\n"
        f"Trackers(load('configs/demo.yaml', []), Path({str(tmp_path)!r}), print).close(False)\n"
        "assert not {'wandb', 'trackio', 'PIL'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("logging", "key"),
    [
        ({"wandb": {}}, "logging.wandb.project"),
        ({"wandb": {"project": "a/b"}}, "logging.wandb.project"),
        ({"wandb": {"project": "a", "mode": "on"}}, "logging.wandb.mode"),
        ({"trackio": {"project": "a", "mode": "offline"}}, "logging.trackio.mode"),
        ({"tensorboard": False, "sample_prompt": ""}, "logging.sample_prompt"),
    ],
)
def test_wrong_keys_of_trackers_are_refused_by_name(tmp_path, logging, key):
    from megakernel.config import validation

    tree = config_of(tmp_path).model_dump(mode="json") | {"logging": logging}
    with pytest.raises(ConfigError) as caught:
        validation.validate(tree)
    assert [problem.key for problem in caught.value.problems] == [key]


def test_a_tracker_shows_samples_without_tensorboard(tmp_path):
    logging = {"tensorboard": False, "sample_prompt": "", "trackio": {"project": "a"}}
    assert config_of(tmp_path, **logging).logging.sample_prompt == ""
