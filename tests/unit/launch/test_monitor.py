import errno
import itertools
import json
import os
import re
import socket
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from tensorboard.program import TensorBoard

from launch import run_progress
from launch.cli import main
from launch.monitor import start_tensorboard
from launch.run_progress import RunProgress
from launch.run_status import status_of
from launch.slurm.job_folder import Job, JobFolder
from launch.slurm.states import JobState
from megakernel.checkpoint.trained_run import recorded_config
from megakernel.config import UserError, to_yaml
from megakernel.training import events
from tests.tiers import tiered
from tests.unit.config.trees import config

LOGGED = {
    "step": 40,
    "train/loss": 2.5,
    "train/tokens": 40 * 8 * 64.0,
    "train/skipped_steps": 2.0,
    "throughput/tokens_per_sec": 64.0 * 8,
    "throughput/mfu": 0.31,
    "health/slowest_rank": 3.0,
    "health/straggle": 1.5,
    "health/data_share": 0.25,
}


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "first"
    (folder / "checkpoints").mkdir(parents=True)
    return folder


def write(run, steps=100, saved=0, **logged):
    settings = {"steps": steps, "seq_len": 64, "global_batch_size": 8}
    (run / "config.yaml").write_text(to_yaml(config(training=settings)))
    if logged:
        (run / "metrics.jsonl").write_text('{"step": 10, "eval/loss": 3.0}\n' + json.dumps(logged) + "\n")
    if saved:
        (run / "checkpoints/latest").write_text(f"step_{saved}")


def write_heartbeat(run, seconds_ago=0.0, process=None, **more):
    heartbeat = {
        "time": time.time() - seconds_ago,
        "host": socket.gethostname(),
        "process": process or os.getpid(),
    }
    (run / "heartbeat.json").write_text(json.dumps(heartbeat | {"place": "forward", "step": 40} | more))


def test_progress_of_a_run_is_read_from_its_files(run):
    write(run, **LOGGED)
    write_heartbeat(run, slowest={"rank": 3, "host": "n2", "straggle": 1.5})
    progress = RunProgress.read(run)
    assert (progress.state, progress.step, progress.step_of_steps, progress.loss, progress.mfu) == (
        "RUNNING",
        40,
        "40/100",
        2.5,
        0.31,
    )
    assert progress.seconds_left == pytest.approx(60)
    assert progress.health == (
        "rank 3 on n2 takes 1.50 x the median, 25% of a step waits for data, 2 steps skipped"
    )


def test_an_unchanged_configuration_is_read_only_once(run, monkeypatch):
    read = []
    monkeypatch.setattr(
        run_progress, "recorded_config", lambda folder: read.append(folder) or recorded_config(folder)
    )
    write(run, **LOGGED)
    assert [RunProgress.read(run).steps for _ in range(3)] == [100, 100, 100]
    assert len(read) == 1
    write(run, steps=200)
    os.utime(run / "config.yaml", (0, 0))
    assert (RunProgress.read(run).steps, len(read)) == (200, 2)


def test_an_ended_run_reports_no_slow_ranks(run):
    write(run, saved=100, **LOGGED)
    assert RunProgress.read(run).health == "2 steps skipped"


def test_ranks_of_equal_speed_are_not_reported(run):
    even = {"health/straggle": 1.02, "health/data_share": 0.01, "train/skipped_steps": 0.0}
    write(run, **LOGGED | even)
    assert RunProgress.read(run).health == ""


def test_states_without_a_scheduler(run):
    write(run)
    assert RunProgress.read(run).state == "EMPTY"
    write(run, **LOGGED)
    assert RunProgress.read(run).state == "STOPPED"
    write_heartbeat(run, seconds_ago=120)
    assert RunProgress.read(run).state == "STOPPED"
    write_heartbeat(run, process=2**22 + 1)  # beyond Linux's process ids: killed a moment ago
    assert RunProgress.read(run).state == "STOPPED"
    events.record(run, "failed", why="no space left")
    assert RunProgress.read(run).state == "FAILED"
    write(run, saved=100, **LOGGED)
    assert RunProgress.read(run).state == "DONE"


def test_one_table_shows_all_runs_and_the_stages_of_an_up_training(run, capsys):
    write(run, **LOGGED)
    stage = run.parent / "up" / "1-transfer"
    (stage / "checkpoints").mkdir(parents=True)
    (run.parent / "up" / "config.yaml").write_text("")
    write(stage, saved=100, **LOGGED)
    (run.parent / "no_run").mkdir()
    assert main(["monitor", "--root", str(run.parent), "--once"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "loss", "eval", "tokens/s", "MFU", "ETA", "remarks"]
    assert [line.split()[:3] for line in lines if line[0] != " "] == [
        ["first", "STOPPED", "40/100"],
        ["up/1-transfer", "DONE", "40/100"],
    ]
    assert main(["monitor", "up", "--root", str(run.parent), "--once"]) == 0
    assert "first" not in capsys.readouterr().out


def write_losses(run, train, evaluated):
    """Metrics of a run with these losses by step."""
    lines = [{"step": step, "train/loss": loss} for step, loss in train.items()]
    lines += [{"step": step, "eval/loss": loss} for step, loss in evaluated.items()]
    write(run)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in sorted(lines, key=lambda x: x["step"]))
    )


def test_a_curve_shows_the_losses_over_tokens_in_80_columns(run, capsys, monkeypatch):
    """A column of the drawing is a place of the run, a line of it a loss: the points are where they belong."""
    monkeypatch.delenv("COLUMNS", raising=False)
    steps = range(1, 101)
    write_losses(run, {step: 5 - 0.04 * step for step in steps}, {0: 5.0, 50: 3.0, 100: 1.0})
    assert main(["monitor", "first", "--root", str(run.parent), "--once", "--curve"]) == 0
    out = capsys.readouterr().out
    table, drawing = out.split("\n\n", 1)
    assert table.splitlines()[1].startswith("first")
    lines = drawing.rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in out
    assert lines[0].strip() == "first: train/loss (line), eval/loss (o)"
    assert lines[-1].strip() == "tokens"
    assert lines[-2].split() == ["0", "12,800", "25,600", "38,400", "51,200"], "512 tokens a step"
    grid = [re.split("[┤│]", line)[1] for line in lines[2:-3]]
    marks = [
        (column, row) for row, line in enumerate(grid) for column, mark in enumerate(line) if mark == "o"
    ]
    width, height = len(grid[0]), len(grid)
    assert len(marks) == 3
    assert marks[0] == (0, 0)
    assert marks[-1] == (width - 1, height - 1)
    assert abs(marks[1][0] - width / 2) < 2
    assert abs(marks[1][1] - height / 2) < 2
    line = [row for row, marks in enumerate(grid) if any("\u2801" <= mark <= "\u28ff" for mark in marks)]
    assert line == list(range(height)), "the line goes from the highest loss to the lowest"


def test_runs_without_a_curve_say_why(run, capsys):
    write(run)
    assert main(["monitor", "--root", str(run.parent), "--once", "--curve"]) == 0
    assert "no curve: first has logged no loss yet" in capsys.readouterr().out
    write_losses(run, {3: 2.0}, {})
    assert main(["monitor", "--root", str(run.parent), "--once", "--curve"]) == 0
    assert "1,536" in capsys.readouterr().out, "one point"
    (run / "metrics.jsonl").write_text("[\n")
    assert main(["monitor", "--root", str(run.parent), "--once", "--curve"]) == 0
    assert f"no curve: {run}/metrics.jsonl is damaged" in capsys.readouterr().out


def test_the_last_evaluation_is_shown_also_of_an_ended_run(run, capsys):
    write(run, saved=100, **LOGGED)
    assert main(["monitor", "--root", str(run.parent), "--once"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert dict(zip(head.split(), line.split()))["eval"] == "3.0000"


def test_json_has_an_object_for_each_run(run, capsys):
    write(run, **LOGGED)
    other = run.with_name("second")
    (other / "checkpoints").mkdir(parents=True)
    write(other)
    assert main(["monitor", "--root", str(run.parent), "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["run"], first["state"], first["loss"], first["eval_loss"]) == (
        str(run),
        "STOPPED",
        2.5,
        3.0,
    )
    assert (second["run"], second["state"], second["loss"], second["steps"]) == (
        str(other),
        "EMPTY",
        None,
        100,
    )


def test_a_transfer_shows_its_current_block_until_the_blocks_are_merged(run, capsys):
    up = JobFolder(run.parent / "up")
    stage = up.path / "1-transfer"
    blocks = [stage / "layers_0-7", stage / "layers_8-15", stage / "layers_16-23"]
    for folder, saved in zip([stage, *blocks], [None, 100, 100, 30], strict=True):
        (folder / "checkpoints").mkdir(parents=True)
        write(folder, saved=saved, **LOGGED)
    assert up.training == blocks[-1]
    assert up.saved_steps() == 230
    assert main(["monitor", "--root", str(run.parent), "--once"]) == 0
    assert "up/1-transfer/layers_16-23" in capsys.readouterr().out
    write(stage, saved=100, **LOGGED)
    assert up.training == stage
    assert up.saved_steps() == 330


def test_the_state_of_a_submitted_run_is_slurms_or_else_that_of_its_folder(run, capsys, monkeypatch):
    write(run, **LOGGED)
    job = Job(id="7", executor="slurm", submission="s", submitted="")
    JobFolder(run).add([job])
    command = ["monitor", "--root", str(run.parent), "--once"]
    monkeypatch.setenv("SLURM_CONF", "/nosuch")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(command) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert "STOPPED" in line
    assert "SLURM_CONF=/nosuch does not exist" in line
    (run / "run.json").unlink()
    JobFolder(run).add([replace(job, id="1", executor="local")])
    events.record(run, "ended", {"MEGAKERNEL_JOB": "1"}, status=143, why="ended by TERM")
    assert main(command) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert "CANCELLED" in line
    assert "ended by TERM" in line


@pytest.mark.parametrize(
    ("event_names", "why"),
    [
        (("submitted",), "without recording why"),
        (("started", "ended", "requeued"), "without recording why"),
        (("started", "ended", "not requeued"), "stopped"),
    ],
)
def test_a_start_that_recorded_no_reason_points_to_the_batch_log(run, event_names, why):
    JobFolder(run).add([Job(id="7", executor="slurm", submission="s", submitted="")])
    for name in event_names:
        events.record(run, name, {"MEGAKERNEL_JOB": "7"}, status=85, why="stopped")
    (run / "logs").mkdir()
    (run / "logs/7.log").touch()
    reason = status_of(JobFolder(run), {"7": JobState("7", "FAILED")}).why
    assert why in reason
    assert (f"{run}/logs/7.log" in reason) == (why == "without recording why")


FROM_OUTSIDE = "[/__w/pair.cc:144] [bold]closed[/bold] by :smile: peer"


def submitted(run, name="1"):
    JobFolder(run).add([Job(id=name, executor="local", submission="s", submitted="")])


@pytest.mark.parametrize("command", [["monitor", "--once"], ["status"]])
def test_text_from_outside_is_shown_without_markup(run, capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "250")
    write(run, **LOGGED)
    submitted(run)
    events.record(run, "ended", {"MEGAKERNEL_JOB": "1"}, status=1, why=FROM_OUTSIDE)
    other = run.with_name("[red]other")
    (other / "checkpoints").mkdir(parents=True)
    write(other, **LOGGED)
    submitted(other)
    assert main([*command, "--root", str(run.parent)]) == 0
    out = capsys.readouterr().out
    assert FROM_OUTSIDE in out
    assert "[red]other" in out


@pytest.mark.parametrize(
    "command", tiered([["monitor", "--once"], ["status"], ["status", "--json"]], [["status"]])
)
@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("metrics.jsonl", "\xff\x00\n\xff\n", "none of its last lines has metrics"),
        (
            "metrics.jsonl",
            '3\n[1]\n{"step": "x", "train/loss": {}, "train/tokens": 1e999}\n',
            "none of its last lines",
        ),
        ("metrics.jsonl", None, "metrics.jsonl cannot be read (Is a directory)"),
        ("config.yaml", "run: [", "config.yaml cannot be read ("),
        ("config.yaml", "training: {steps: 3}", "config.yaml cannot be read ("),
        ("config.yaml", "- " * 5000, "config.yaml cannot be read ("),
        ("config.yaml", None, "config.yaml cannot be read (Is a directory)"),
        ("events.jsonl", "3\n{}\n[]\n", ""),
        ("events.jsonl", None, "events.jsonl cannot be read (Is a directory)"),
        ("heartbeat.json", '{"time": "x"}', ""),
        ("heartbeat.json", "[3]", ""),
        ("checkpoints/latest", None, ""),
        ("run.json", "{}", "run.json cannot be read ("),
        ("run.json", '{"jobs": [{"id": 3}]}', "run.json cannot be read ("),
        ("run.json", '{"jobs": []}', "run.json cannot be read (it lists no job)"),
    ],
)
def test_an_unreadable_run_does_not_hide_the_others(run, capsys, monkeypatch, command, file, content, why):
    monkeypatch.setenv("COLUMNS", "500")
    broken = run.with_name("broken")
    (broken / "checkpoints").mkdir(parents=True)
    for folder, job in ((run, "1"), (broken, "2")):
        write(folder, **LOGGED)
        submitted(folder, job)
    (broken / file).unlink(missing_ok=True)
    if content is None:
        (broken / file).mkdir()
    else:
        (broken / file).write_text(content, encoding="latin-1")
    assert main([*command, "--root", str(run.parent)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "first" in line or "broken" in line]
    assert len(lines) == 2
    assert why in lines[0]
    assert "40" in lines[1]


def test_a_private_run_of_another_user_is_not_listed(run, capsys, monkeypatch):
    write(run, **LOGGED)
    (run.parent / "private").mkdir()

    def exists(folder):
        if folder.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder.path))
        return False

    monkeypatch.setattr(JobFolder, "exists", property(exists))
    assert main(["monitor", "--root", str(run.parent), "--once"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("first ")


def test_tensorboard_shows_a_single_run_by_its_name(run, monkeypatch):
    passed = []
    monkeypatch.setattr(TensorBoard, "configure", lambda self, argv: passed.extend(argv))
    monkeypatch.setattr(TensorBoard, "launch", lambda self: "")
    start_tensorboard(run.parent, [run], "localhost", 0)
    assert passed[1:3] == ["--logdir_spec", f"first:{run}"]


def test_tensorboard_gets_a_different_name_for_each_run(run, monkeypatch):
    passed = []
    monkeypatch.setattr(TensorBoard, "configure", lambda self, argv: passed.extend(argv))
    monkeypatch.setattr(TensorBoard, "launch", lambda self: "")
    stages = [run.parent / name / "1-transfer" for name in ("a", "b")]
    start_tensorboard(run.parent, stages, "localhost", 0)
    start_tensorboard(run.parent / "a", stages, "localhost", 0)
    specs = [value for option, value in itertools.pairwise(passed) if option == "--logdir_spec"]
    assert specs == [
        f"a/1-transfer:{stages[0]},b/1-transfer:{stages[1]}",
        f"1-transfer:{stages[0]},../b/1-transfer:{stages[1]}",
    ]


@pytest.mark.parametrize(
    ("options", "status", "error"),
    [
        (["nosuch"], 3, "nosuch is no run; runs: first"),
        (["--every", "0"], 2, "--every 0.0 is not positive"),
        (["--port", "99999"], 2, "--port 99999 is no port"),
        (["--json", "--curve"], 2, "--curve has no effect with --json"),
        (["--once", "--every", "2"], 2, "--every 2.0 has no effect with --once"),
        (["--once", "--port", "0"], 2, "--port 0 has no effect with --once"),
        (["--json", "--every", "2"], 2, "--every 2.0 has no effect with --json"),
        (["--no-tensorboard", "--host", "::"], 2, "--host :: has no effect with --no-tensorboard"),
        (["--root", "nowhere"], 3, "nowhere does not exist"),
    ],
)
def test_invalid_options_are_refused_in_one_line(run, capsys, options, status, error):
    write(run)
    assert main(["monitor", "--root", str(run.parent), *options]) == status
    [line] = capsys.readouterr().err.splitlines()
    assert error in line


def test_an_address_of_another_machine_is_refused(run):
    with pytest.raises(UserError, match=r"--host 192\.0\.2\.1 cannot be served from"):
        start_tensorboard(run.parent, [], "192.0.2.1", 0)


def status_table(run, capsys):
    assert main(["status", "--root", str(run.parent)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["350m", "pretrain-350m-flurka-lr-3e-3-12"])
def test_status_fits_80_columns_with_name_job_step_and_reason(run, capsys, monkeypatch, name):
    run = run.rename(run.with_name(name))
    write(run, steps=100_000, **LOGGED | {"step": 90_000})
    submitted(run, "12345678_12")
    why = "failed (rank 12 on node-0123: RuntimeError: Connection reset by peer); 10 restarts in a row saved no step"
    events.record(run, "ended", {"MEGAKERNEL_JOB": "12345678_12"}, status=1, why=why)
    monkeypatch.setenv("COLUMNS", "80")
    lines = status_table(run, capsys)
    assert max(map(len, lines)) <= 80
    for word in (name, "12345678_12", "FAILED", "90000/100000", *why.split()):
        assert word in " ".join(lines).split()
    assert main(["status", name, "--root", str(run.parent)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_piped_status_prints_one_full_line_per_run(run, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    write(run, **LOGGED)
    submitted(run)
    why = "a long story " * 30
    events.record(run, "ended", {"MEGAKERNEL_JOB": "1"}, status=1, why=why)
    _, line = status_table(run, capsys)
    assert line.endswith(why.strip())
    assert "512" in line.split(), "tokens/s"


def status_in_slurm(run, state, started=0.0, step=0):
    """The status of a run whose job 7 has this state and restarted `started` seconds ago after `step`."""
    JobFolder(run).add([Job(id="7", executor="slurm", submission="s", submitted="")])
    begun = datetime.fromtimestamp(time.time() - started, timezone.utc).isoformat()
    line = {"time": begun, "event": "started", "job": "7", "restart": 1, "nodes": "n[1-2]", "step": step}
    (run / "events.jsonl").write_text(json.dumps(line) + "\n")
    return status_of(JobFolder(run), {"7": JobState("7", state)})


@pytest.mark.parametrize(
    ("state", "started", "step"),
    [("PENDING", 10, 0), ("RUNNING", -10, 30), ("RUNNING", 10, 40)],
    ids=["waits again", "has not read the run's files yet", "has cut them to the saved step"],
)
def test_measurements_of_the_previous_start_are_not_shown_as_current(run, state, started, step):
    write(run, saved=step, **LOGGED)
    write_heartbeat(run, seconds_ago=20)
    shown = dict(status_in_slurm(run, state, started, step).rows())
    assert (shown["step"], shown["loss"], shown["health"]) == ("40/100", "2.5000", "2 steps skipped")
    assert not {"tokens/s", "ETA", "heartbeat"} & shown.keys()
    assert ("nodes" in shown) is (state == "RUNNING")


def test_measurements_of_the_current_start_are_shown(run):
    write(run, saved=30, **LOGGED)
    write_heartbeat(run)
    shown = dict(status_in_slurm(run, "RUNNING", 10, 30).rows())
    assert (shown["tokens/s"], shown["ETA"], shown["nodes"]) == ("512", "0:01:00", "n[1-2]")
    assert "heartbeat" in shown
