"""Secrets of a submission, and the files that its code snapshot leaves out."""

import os
import subprocess
import sys
from pathlib import Path

from launch.shipped import REPOSITORY
from launch.slurm.job_folder import SECRETS, JobFolder
from launch.slurm.script import Script
from launch.slurm.submission import write_snapshot
from megakernel.config.cluster import Cluster
from megakernel.training.environment import revision

TOKEN = "it's hunter2"


def test_secrets_are_stored_in_one_file_that_only_the_owner_can_read(tmp_path):
    typed = "submit --cluster debug --name one --env HF_TOKEN --env MY_KEY=a=1 --env NCCL_DEBUG=WARN -- "
    subprocess.run(
        [sys.executable, "-m", "launch.cli", *typed.split(), "reshape", "runs/nosuch"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_TOKEN": TOKEN},
        capture_output=True,
        check=False,
    )
    run = JobFolder(tmp_path / "runs/one")
    (job,) = run.jobs()
    folder = run.submission(job.submission)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == [folder / SECRETS]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in (folder / SECRETS, folder / "settings.json")} == {0}
    # Resuming the job restores all of them.
    wanted = {"HF_TOKEN": TOKEN, "MY_KEY": "a=1", "NCCL_DEBUG": "WARN"}
    assert run.settings(job).resources.environment == wanted


def test_a_script_holds_no_secret_values_and_loads_them_when_it_runs(tmp_path):
    cluster = Cluster(environment={"HF_TOKEN": TOKEN, "NCCL_DEBUG": "WARN"})
    text = Script("command", cluster, tmp_path, "now", ["prepare"]).text()
    assert "hunter2" not in text
    lines = text[text.index("run=") : text.index("export MEGAKERNEL_JOB")]
    show = "\necho $HF_TOKEN, $NCCL_DEBUG; env | grep -c ^HF_TOKEN"

    def run():
        return subprocess.run(["bash"], input=lines + show, capture_output=True, text=True, check=False)

    assert run().returncode == 1, "a job without its secrets ends at once"
    (tmp_path / "submissions/now").mkdir(parents=True)
    (tmp_path / "submissions/now" / SECRETS).write_text("""HF_TOKEN='it'"'"'s hunter2'\n""")
    assert run().stdout == f"{TOKEN}, WARN\n1\n"


def test_a_snapshot_holds_only_code(tmp_path):
    checkout = tmp_path / "checkout"
    tracked = ("launch/cli.py", "configs/cluster/slurm.yaml", "launch/old.py")
    untracked = (".env", "notes.txt", "configs/cluster/mine.yaml", "megakernel/new.py", "launch/key.pem")
    for name in (*tracked, *untracked):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("old\n")

    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@t")
        subprocess.run(["git", *identity, *arguments], cwd=checkout, check=True, capture_output=True)

    git("init", "-q")
    git("add", *tracked)
    git("commit", "-qm", "first")
    (checkout / "launch/old.py").write_text("new\n")
    (checkout / "configs/cluster/slurm.yaml").write_text(TOKEN)
    code = write_snapshot(tmp_path / "code", checkout)
    snapshot = {str(path.relative_to(code)): path for path in code.rglob("*") if path.is_file()}
    compiled = {name for name in snapshot if name.endswith(".pyc")}
    assert snapshot.keys() - compiled == {
        "revision.txt",
        "launch/cli.py",
        "launch/old.py",
        "megakernel/new.py",
    }
    assert {Path(name).name.partition(".")[0] for name in compiled} == {"cli", "old", "new"}
    assert snapshot["launch/old.py"].read_text() == "new\n"
    assert revision(code / "launch/cli.py") == revision(checkout / "launch/cli.py")
    assert "(dirty)" in revision(code / "launch/cli.py")
