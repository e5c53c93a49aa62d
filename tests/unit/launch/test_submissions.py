"""Submissions that need no cluster: what they ask for, and jobs in the background of this machine."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from launch.cli import main, parse
from launch.resume import SET_ASIDE, _later_checkpoints_renamed
from launch.shipped import REPOSITORY
from launch.slurm.attempt import Attempt
from launch.slurm.job_folder import SETTINGS, Job, JobFolder, Settings, write_settings
from launch.slurm.options import cores_per_task
from launch.slurm.states import JobState
from launch.submit import _request_training, indices
from megakernel.checkpoint.folder import free_name
from megakernel.checkpoint.manifest import SavedProgress, flushed, write_manifest
from megakernel.config import UserError, from_yaml, to_yaml
from megakernel.config.cluster import Cluster
from megakernel.training import events

from .launching import INSTALLED_SCRIPT


@pytest.mark.second
def test_a_background_job_outlives_the_reader_of_submit_and_ctrl_c(tmp_path):
    if sys.version_info >= (3, 11):
        (tmp_path / "queue.py").write_text("raise SystemExit('not the standard library')")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # the job waits until somebody opens it
    submit = subprocess.Popen(
        [
            *(sys.executable, "-c", INSTALLED_SCRIPT),
            *("submit", "--cluster", "local", "--name", "one", "--json"),
            *("--", "generate", "nosuch", "--prompt-file", str(pipe)),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    run = JobFolder(tmp_path / "runs/one")
    try:
        out, _ = submit.communicate(timeout=120)  # returns when the job holds none of its pipes
        (job,) = json.loads(out)["jobs"]
        os.killpg(submit.pid, signal.SIGINT)
        os.killpg(submit.pid, signal.SIGHUP)
    finally:
        # In a thread, as it waits until the job opens the pipe.
        threading.Thread(target=pipe.write_text, args=("a prompt",), daemon=True).start()
    assert (run.path / "logs" / f"{job}.log").read_text() == ""
    assert main(["logs", str(run.path), "-f", "--stderr"]) == 0  # returns when the job has ended
    assert [event["status"] for event in run.events(job) if event["event"] == "ended"] == [2]


def test_repeated_indices_of_an_array_count_once():
    assert indices("1,1,0-2%2") == [1, 0, 2]


@pytest.mark.parametrize(
    ("sweep", "error"),
    [
        ("{config: 5, name: lr, grid: {training.steps: [1]}}", "config=5 is no text; write it in quotes"),
        ("{config: run.yaml, name: null, grid: {training.steps: [1]}}", "name=None is no text"),
        ("{config: run.yaml, grid: {training.steps: [1]}}", "is no sweep; give it config, name and grid"),
        ("{config: run.yaml, name: lr, grid: {training.steps: 1}}", "grid.training.steps=1 is no list"),
        (
            "{config: run.yaml, name: lr, grid: {run.name: [a, b]}}",
            "grid.run.name=['a', 'b'] is set by name; leave it out of the grid",
        ),
        (
            "{config: run.yaml, name: lr, grid: {optimizer.lr: [1e-3, 3e-3, 1e-3]}}",
            "grid.optimizer.lr has 0.001 twice, which would be two equal runs",
        ),
    ],
)
def test_an_invalid_sweep_is_refused(sweep, error, tmp_path, refused):
    (tmp_path / "sweep.yaml").write_text(sweep)
    assert error in refused("sweep", tmp_path / "sweep.yaml")


@pytest.mark.parametrize("override", ["training.steps=5", "run.name=mine"])
def test_an_override_of_what_a_sweep_sets_is_refused(override, tmp_path, refused):
    (tmp_path / "sweep.yaml").write_text("{config: run.yaml, name: lr, grid: {training.steps: [1, 2]}}")
    assert f"{override} is set by {tmp_path}/sweep.yaml" in refused(
        "sweep", tmp_path / "sweep.yaml", override
    )


@pytest.fixture
def run(tmp_path):
    run = JobFolder(tmp_path / "run")
    run.submission("s").mkdir(parents=True)
    run.add([Job("999999999", "local", "s", "")])
    return run


def test_resume_without_a_run_is_refused(refused):
    assert "training.steps=8 changes no run; name the runs" in refused("resume", "training.steps=8")


@pytest.mark.parametrize("content", ["{", "{}", None])
def test_a_run_with_unreadable_settings_cannot_be_resumed(content, run, refused):
    file = run.submission("s") / SETTINGS
    if content is not None:
        file.write_text(content)
    assert f"{file} cannot be read (" in refused("resume", run.path)


CONFIG = """
run: {name: run, root: ROOT}
model: {num_layers: 1, hidden_size: 32, num_heads: 1}
data: {train: nosuch}
training: {steps: 1, seq_len: 512, global_batch_size: 1}
"""


@pytest.fixture
def training(run):
    """A run that was trained as a job without a chain, and has failed."""
    settings = {"command": ["pretrain", "x"], "cluster": {}, "name": "run"}
    (run.submission("s") / SETTINGS).write_text(json.dumps(settings))
    (run.submission("s") / "config.yaml").write_text(CONFIG.replace("ROOT", str(run.path.parent)))
    events.record(run.path, "ended", env={events.JOB_VARIABLE: "999999999"}, status=1)
    return run


@pytest.mark.parametrize("chain", [1, 2])
@pytest.mark.parametrize(
    "cluster", [{}, {"requeue": True}], ids=["default", "as earlier versions recorded it"]
)
def test_jobs_of_a_resumed_chain_are_not_requeued(chain, cluster, training, capsys):
    settings = {"command": ["pretrain", "x"], "cluster": cluster | {"environment": {}}, "name": "run"}
    (training.submission("s") / SETTINGS).write_text(json.dumps(settings))
    resume = ["resume", str(training.path), "--dependency", "after:17", "--dry-run", "--chain", str(chain)]
    assert main(resume) == 0
    assert ("#SBATCH --no-requeue\n" in capsys.readouterr().out) == (chain > 1)


def test_a_chain_does_not_turn_requeuing_off_for_the_rest_of_the_run(training, monkeypatch, capsys):
    submission = training.submission("s")
    submit = ["submit", str(submission / "config.yaml"), "--dependency", "after:17", "--chain", "2"]
    request = _request_training(parse(submit))
    assert "#SBATCH --no-requeue\n" in request.text()
    recorded = Settings(list(request.command), request.cluster.model_dump(mode="json"), "run", request.chain)
    write_settings(submission, recorded)
    monkeypatch.setenv(events.JOB_VARIABLE, "999999999")
    assert Attempt(submission).max_restarts == 0
    assert main(["resume", str(training.path), "--dependency", "after:17", "--dry-run"]) == 0
    assert "#SBATCH --requeue\n" in capsys.readouterr().out


def test_a_change_on_purpose_is_in_the_job_and_others_are_refused_before_it(training, refused, capsys):
    trained = from_yaml(CONFIG.replace("ROOT", str(training.path.parent)))
    (training.path / "config.yaml").write_text(to_yaml(trained))
    resume = ["resume", str(training.path), "--dependency", "after:17", "--dry-run", "optimizer.lr=1e-5"]
    assert "--allow-change optimizer.lr" in refused(*resume)
    said = refused(*resume, "--allow-change", "optimizer.lr", "--allow-change", "model.num_layers")
    assert "--allow-change=model.num_layers cannot change within a run" in said
    assert main([*resume, "--allow-change", "optimizer.lr"]) == 0
    assert '"$submission"/config.yaml --allow-change optimizer.lr ' in capsys.readouterr().out
    said = refused("submit", "--allow-change", "optimizer.lr", "--dry-run", "--", "evaluate", "nosuch")
    assert "--allow-change optimizer.lr is only for training" in said


def saved(run, step) -> Path:
    """A checkpoint of a run, with one file."""
    folder = run.path / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    weights = folder / "weights.pt"
    weights.write_bytes(b"weights")
    write_manifest(folder, SavedProgress(step, 0, 0, {}, {}), flushed(folder, [weights]))
    return weights


def test_resume_from_a_damaged_checkpoint_is_refused_before_anything_is_renamed(training, refused):
    saved(training, 20)
    weights = saved(training, 10)
    weights.write_bytes(b"weigh")
    said = refused("resume", training.path, "--dependency", "after:17", "--from-step", "10")
    assert "--from-step 10 cannot be used (weights.pt has 5 bytes instead of 7)" in said
    assert {path.name for path in weights.parents[1].iterdir()} == {"step_10", "step_20"}


@pytest.mark.parametrize("shown", ["--dry-run", "--test-only"])
def test_what_submits_no_job_prints_no_json_about_it(shown, training, refused):
    said = refused("resume", training.path, "--dependency", "after:17", shown, "--json")
    assert f"--json has no effect with {shown}" in said


def test_lines_of_setup_follow_those_of_the_cluster_file(training, tmp_path, capsys):
    (tmp_path / "cluster.yaml").write_text("setup: [module load cuda]\n")
    config = str(training.submission("s") / "config.yaml")
    setup = ["--setup", "ulimit -c 0", "--dependency", "after:17", "--dry-run"]
    assert main(["submit", config, "--cluster", str(tmp_path / "cluster.yaml"), *setup]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("module load cuda") == lines.index("ulimit -c 0") - 1
    settings = {"command": ["pretrain", "x"], "cluster": {"setup": ["module load cuda"]}, "name": "run"}
    (training.submission("s") / SETTINGS).write_text(json.dumps(settings))
    assert main(["resume", str(training.path), *setup]) == 0
    assert "module load cuda\nulimit -c 0\n" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "cores"), [("h100", 12), ("a100", 8), (None, 8), ("l40", None)])
def test_processes_share_the_cores_of_nodes_with_the_requested_gpus(kind, cores, monkeypatch):
    nodes = "gpu* 96 gpu:h100:8(S:0-1)\ngpu* 64 gpu:a100:8\ngpu* 16 (null)\n"
    monkeypatch.setattr("launch.slurm.options.check_output", lambda *words: nodes)
    found = cores_per_task(Cluster(gpus_per_node=4, gpu_type=kind))
    assert found == ({} if cores is None else {"cpus-per-task": str(cores)})


def test_slurm_is_asked_once_unless_something_is_changed_before_the_submission(training, monkeypatch):
    asked = []
    monkeypatch.setattr("launch.resume.refuse_live", asked.append)
    monkeypatch.setattr("launch.resume.carry_out", lambda request, args: 0)
    saved(training, 10)
    resume = ["resume", str(training.path), "--dependency", "after:17"]
    assert main(resume) == 0
    assert len(asked) == 0
    assert main([*resume, "--from-step", "10"]) == 0
    assert len(asked) == 1


def test_resume_finds_the_runs_of_a_dependency_under_its_root(training, refused):
    root = training.path.parent
    said = refused("resume", "run", "--root", root, "--dependency", "afterok:run", "--dry-run")
    assert f"{training.path} has ended (999999999 FAILED)" in said


def test_the_step_to_continue_from_is_the_saved_one_unless_the_submission_fails(run):
    checkpoints = run.path / "checkpoints"
    for step in (10, 20, 30):
        (checkpoints / f"step_{step}").mkdir(parents=True)
    (checkpoints / "latest").write_text("step_30")
    with suppress(UserError), _later_checkpoints_renamed(run, 10):
        raise UserError("refused")
    assert run.saved_steps() == 30
    assert {path.name for path in checkpoints.iterdir()} == {"step_10", "step_20", "step_30", "latest"}
    with _later_checkpoints_renamed(run, 10):
        pass
    assert run.saved_steps() == 10
    kept = {"step_10", "step_20.set_aside", "step_30.set_aside", "latest"}
    assert {path.name for path in checkpoints.iterdir()} == kept


def test_a_refused_submission_leaves_no_latest_where_there_was_none(run):
    (run.path / "checkpoints" / "step_10").mkdir(parents=True)
    with suppress(UserError), _later_checkpoints_renamed(run, 10):
        raise UserError("refused")
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step_10"]


def test_checkpoints_set_aside_never_take_a_name_in_use(tmp_path):
    path = tmp_path / "step_20"
    for name in ("step_20.set_aside1", "step_200.set_aside"):
        (tmp_path / name).mkdir()
    assert free_name(path, SET_ASIDE).name == "step_20.set_aside"
    free_name(path, SET_ASIDE).mkdir()
    assert free_name(path, SET_ASIDE).name == "step_20.set_aside2"


def test_cancel_ignores_a_job_that_has_just_ended(run, monkeypatch, capsys):
    live = JobState("999999999", "RUNNING")
    monkeypatch.setattr("launch.cancel.job_states", lambda run, by_slurm: {live.job: live})
    assert main(["cancel", str(run.path)]) == 0
    assert capsys.readouterr().out == f"999999999 ends: {run.path}\n"
