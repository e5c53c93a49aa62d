"""An invalid submission is refused in one line, and leaves no files behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.exit_status import ExitStatus
from tests.slurm.submitting import last, megakernel, status, story, submit, until, until_state

USAGE, NOT_FOUND, REFUSED = ExitStatus.USAGE, ExitStatus.NOT_FOUND, ExitStatus.REFUSED

REFUSALS = {
    "submit run.yaml -p nosuch": (REFUSED, "partition=nosuch: ", "choose one of the partitions: low, high"),
    "submit run.yaml -N 4": (REFUSED, "nodes=4, gpus_per_node=1: ", "ask for less"),
    "submit run.yaml -G 4": (REFUSED, "nodes=1, gpus_per_node=4: ", "ask for less"),
    "submit run.yaml -G a100:1": (REFUSED, "nodes=1, gpus_per_node=1, gpu_type=a100: ", "ask for less"),
    "submit run.yaml -G simulated:x": (USAGE, "gpus_per_node=x ", "change it"),
    "submit run.yaml --mem 900G": (REFUSED, "mem=900G: ", "ask for less"),
    "submit run.yaml --mem 2X": (USAGE, "mem=2X ", "such as 200G"),
    "submit run.yaml --nodelist n7": (REFUSED, "nodelist=n7: ", "choose nodes of this cluster, none"),
    "submit run.yaml --nodelist n1 --exclude n1": (REFUSED, "nodelist=n1, exclude=n1: ", "excluded: n1, n2"),
    "submit run.yaml --nodelist n1,n2": (REFUSED, "nodelist=n1,n2: ", "ask for less"),
    "submit run.yaml --mem=-1": (USAGE, "mem=-1 ", "such as 200G"),
    "submit run.yaml -C a100": (REFUSED, "constraint=a100: ", "`sinfo` shows"),
    "submit run.yaml --reservation mine": (REFUSED, "reservation=mine: ", "scontrol show reservation"),
    "submit run.yaml --dependency after_lunch": (REFUSED, "dependency=after_lunch: ", "such as afterok:17"),
    "submit run.yaml --sbatch frobnicate=1": (REFUSED, "frobnicate", "sbatch --help"),
    "submit run.yaml --sbatch array=0-3": (USAGE, "sbatch.array=0-3 ", "give --array"),
    "submit run.yaml --sbatch nodes=4": (USAGE, "sbatch.nodes=4 ", "give --nodes"),
    "submit": (USAGE, "required: CONFIG;", "megakernel submit --help"),
    "submit pretrain run.yaml": (USAGE, "submit pretrain: ", "megakernel submit CONFIG"),
    "submit doctor": (USAGE, "submit doctor ", "one of prepare, evaluate"),
    "submit run.yaml --node 2": (USAGE, "could match --nodes, --nodelist", "--help"),
    "submit run.yaml --mounts /a:/b": (USAGE, "container.image is missing", "add it"),
    "submit -- evaluate": (USAGE, "required: RUN;", "megakernel evaluate --help"),
    "submit run.yaml --chain 2 --cluster local": (USAGE, "--chain needs Slurm", "leave it out"),
    "submit run.yaml --array 0-2000": (USAGE, "--array 0-2000 ", "give at most 1000 at once"),
    "submit run.yaml --array 3-1": (USAGE, "--array 3-1 ", "write 0-7"),
    "submit run.yaml -t 1x": (USAGE, "time=1x ", "write minutes"),
    "submit run.yaml -t 1": (USAGE, "time=1 ", "lower signal_delay"),
    "submit run.yaml -N none": (USAGE, "nodes=none ", "change it"),
    "submit run.yaml --env 1X=2": (USAGE, "environment=1X ", "write NAME=VALUE"),
    "submit run.yaml --cluster nosuch": (USAGE, "--cluster nosuch ", "name a YAML file"),
    "submit run.yaml --cluster local -N 2": (USAGE, "nodes=2 ", "set nodes to 1"),
    "submit run.yaml --cluster debug --container mk.sqsh": (USAGE, "container=mk.sqsh ", "leave it out"),
    "submit run.yaml -G 3": (USAGE, "training.global_batch_size=4 ", "set 3 or 6"),
    "submit nosuch.yaml": (USAGE, "nosuch.yaml cannot be read", "name a YAML file"),
    "submit run.yaml data.train=nosuch": (USAGE, "data.train", "prepare"),
    "submit run.yaml training.stepps=3": (USAGE, "training.stepps=3 ", "did you mean steps?"),
    "submit run.yaml run.root=run.yaml": (USAGE, "cannot hold the run", "choose another run.root"),
    "submit --array 0-3 -- evaluate runs/demo": (USAGE, "--array 0-3", "write %a where they differ"),
    "submit run.yaml --chain 0": (USAGE, "--chain: 0 ", "at least 1"),
    "status nosuch": (NOT_FOUND, "nosuch is no submitted run", ""),
    "logs 12345": (NOT_FOUND, "12345 is no submitted run", ""),
    "cancel nosuch": (NOT_FOUND, "nosuch is no submitted run", ""),
    "resume nosuch": (NOT_FOUND, "nosuch is no submitted run", ""),
}


def files(folder):
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("words", REFUSALS)
def test_an_invalid_command_is_refused_in_one_line_with_the_remedy(words, place):
    before = files(place)
    expected, reason, remedy = REFUSALS[words]
    said = megakernel(words)
    assert said.status == expected, said
    (line,) = said.err.splitlines()
    assert line.startswith("megakernel: error: ")
    assert reason in line
    assert remedy in line
    assert said.out == ""
    assert files(place) == before


def test_an_unreachable_slurm_is_a_one_line_error(place, tmp_path, monkeypatch):
    text = Path(os.environ["SLURM_CONF"]).read_text()
    (tmp_path / "slurm.conf").write_text(
        text.replace("SlurmctldPort=16817", "SlurmctldPort=9\nMessageTimeout=2")
    )
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    before = files(place)
    said = megakernel("submit run.yaml --test-only")
    assert said.status == REFUSED
    assert "sbatch cannot reach Slurm (" in said.err
    assert "Unable to contact slurm controller" in said.err
    assert len(said.err.splitlines()) == 1
    assert files(place) == before


def test_a_machine_without_slurm_is_a_one_line_error(place, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    before = files(place)
    said = megakernel("submit run.yaml")
    assert (said.status, len(said.err.splitlines())) == (REFUSED, 1)
    assert "--cluster local" in said.err
    assert files(place) == before


def test_dry_run_prints_a_script_that_slurm_accepts_and_leaves_no_files(place):
    before = files(place)
    said = megakernel("submit run.yaml -N 2 -G 2 -t 30 --env NCCL_DEBUG=INFO --sbatch comment=mine --dry-run")
    assert said.status == 0
    assert "#SBATCH --nodes=2\n" in said.out
    assert "#SBATCH --comment=mine\n" in said.out
    assert "export NCCL_DEBUG=INFO\n" in said.out
    assert "{{" not in said.out
    tested = megakernel("submit run.yaml -N 2 -G 2 -t 30 --test-only")
    assert tested.status == 0
    assert "using 8 processors on nodes n[1-2] in partition low" in tested.out
    assert files(place) == before


@pytest.mark.parametrize(
    ("container", "started"),
    [
        ("{image: mk.sqsh, mounts: ['/a:/b']}", "--container-image=mk.sqsh --container-mounts=/a:/b"),
        ("{runtime: apptainer, image: mk.sif}", "apptainer exec --nv mk.sif python -m launch.cli pretrain"),
        ("{runtime: enroot, image: mk.sqsh}", "exec enroot start --rw "),
    ],
    ids=["pyxis", "apptainer", "enroot"],
)
def test_dry_run_shows_how_a_container_is_entered(container, started, place, tmp_path):
    (tmp_path / "cluster.yaml").write_text(f"container: {container}\n")
    said = megakernel(f"submit run.yaml --cluster {tmp_path}/cluster.yaml --dry-run")
    assert said.status == 0, said.err
    assert started in said.out


def test_a_run_has_one_live_job_which_can_be_cancelled_before_it_starts(place):
    (job,) = submit("run.yaml --name held --sbatch hold")
    assert status("held")["why"] == "JobHeldUser"
    before = files(place)
    said = megakernel("submit run.yaml --name held")
    assert said.status == USAGE
    assert f"has a live job ({job} PENDING)" in said.err
    assert files(place) == before

    assert megakernel("cancel", job).status == 0
    until_state("held", "CANCELLED")
    assert story("held") == ["submitted", "cancelled"]
    assert megakernel("cancel held").status == NOT_FOUND
    # A command would become the run's last job, which cannot be resumed.
    before = files(place)
    said = megakernel("submit --name held -- evaluate runs/held")
    assert (said.status, "runs/held is a training run; choose another --name" in said.err) == (USAGE, True)
    assert files(place) == before


def test_a_live_job_of_another_user_is_detected(place):
    submit("run.yaml --name theirs --sbatch hold --sbatch uid=nobody")
    (submission,) = Path("runs/theirs/submissions").iterdir()
    shutil.chown(submission, "nobody")
    assert status("theirs")["state"] == "PENDING"
    assert "has a live job (" in megakernel("submit run.yaml --name theirs").err
    assert megakernel("cancel theirs").status == 0


def test_no_member_of_an_array_is_resumed_if_one_is_live(place):
    submit("run.yaml --name pair --array 0-1 --sbatch hold")
    assert megakernel("cancel pair-0").status == 0
    until_state("pair-0", "CANCELLED")
    said = megakernel("resume pair --sbatch hold")
    assert (said.status, "runs/pair-1 has a live job (" in said.err) == (USAGE, True)
    assert story("pair-0") == ["submitted", "cancelled"]
    assert megakernel("cancel pair").status == 0


def test_a_job_whose_parent_fails_is_cancelled_and_does_not_wait_forever(place):
    (parent,) = submit("--name parent -- evaluate runs/nosuch")
    submit(f"run.yaml --name child --dependency afterok:{parent}")
    why = until_state("parent", "FAILED")["why"]
    assert why.startswith("refused its command line or configuration (runs/nosuch is not the folder of a run")
    assert "runs/nosuch is not the folder of a run" in megakernel("logs parent --stderr").out
    assert until_state("child", "CANCELLED")["why"] == "cancelled"
    assert story("child") == ["submitted"]
    assert last("parent", "ended")["status"] == USAGE


def typed(place, words, path):
    """Start the command in a process of its own, with `sbatch` from `path`."""
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cli", *words.split()],
        cwd=place,
        env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_of_two_submits_of_one_run_at_once_the_second_is_refused(place, tmp_path):
    # Long enough for the second submission to check for a live job before the first has one.
    slow = tmp_path / "sbatch"
    slow.write_text(f'#!/bin/bash\ntouch first\nsleep 12\nexec {shutil.which("sbatch")} "$@"\n')
    slow.chmod(0o755)
    both = [typed(place, "submit run.yaml --name twice --sbatch hold", tmp_path)]
    until(Path("first").exists)
    both.append(typed(place, "submit run.yaml --name twice --sbatch hold", tmp_path))
    errors = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, USAGE], errors
    assert "has a live job (" in "".join(errors)
    assert story("twice") == ["submitted"]
    assert megakernel("cancel twice").status == 0
    assert "submitting" not in {path.name for path in Path("runs/twice").iterdir()}


def test_a_killed_submission_does_not_lock_the_run(place, tmp_path):
    stuck = tmp_path / "sbatch"
    stuck.write_text("#!/bin/bash\ntouch stuck\nsleep 600\n")
    stuck.chmod(0o755)
    process = typed(place, "submit run.yaml --name killed --sbatch hold", tmp_path)
    until(Path("stuck").exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: megakernel("submit run.yaml --name killed --sbatch hold").status == 0)
    assert megakernel("cancel killed").status == 0


@pytest.mark.second
def test_without_slurmctld_status_shows_the_run_folder(place):
    (job,) = submit("run.yaml --name alone --sbatch hold")
    folder = Path(os.environ["SLURM_CONF"]).parent
    pid = int((folder / "run/slurmctld.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    until(lambda: not Path(f"/proc/{pid}").exists())
    try:
        said = megakernel("status alone")
        table = megakernel("status")
        assert megakernel("cancel alone").status == REFUSED
    finally:
        subprocess.run(["slurmctld"], check=True)
    assert (said.status, table.status) == (0, 0)
    assert f"job        {job}\n" in said.out
    assert "squeue cannot reach Slurm (" in said.out
    assert "squeue cannot reach Slurm (" in table.out
    until_state("alone", "PENDING")
    assert megakernel("cancel alone").status == 0
