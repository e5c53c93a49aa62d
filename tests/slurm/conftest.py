"""A real cluster for each module: slurmctld, two slurmd and munged on this machine."""

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from launch.cli import main
from tests.slurm.submitting import node_states, scontrol, take_jobs_again, takes_jobs

REPOSITORY = Path(__file__).parents[2]
LOCAL_CLUSTER = REPOSITORY / "slurm" / "local_cluster"
CONFIG = """
run: {name: run, seed: 7}
model:
  num_layers: 2
  hidden_size: 32
  num_heads: 2
  attention: {preset: flurka, compression: {block_size: 16, rank: 4}}
parallel: {zero_stage: 0}
training:
  steps: 100
  seq_len: 64
  global_batch_size: 4
  micro_batch_size: 1
  dtype: float32
  log_every: 1
  eval_samples: 0
optimizer: {lr: 1e-3}
schedule: {name: constant, warmup_steps: 2}
checkpoint: {every: 10}
logging: {tensorboard: false}
data: {train: corpus}
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slurm")
            item.add_marker(pytest.mark.timeout(900))  # jobs share the machine with the other tests


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    """The local cluster, started for a module, with an accounting database if the module sets ACCOUNTING."""
    accounting = getattr(request.module, "ACCOUNTING", False)
    search = os.environ["PATH"] + ":/usr/sbin:/sbin"
    programs = ["slurmctld", "slurmd", "munged", *(["slurmdbd", "mariadbd"] if accounting else [])]
    missing = [name for name in programs if shutil.which(name, path=search) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge slurmdbd mariadb-server"
        )
    if os.geteuid():
        pytest.skip("slurmd needs root")
    start = [LOCAL_CLUSTER, "start", *(["--accounting"] if accounting else [])]
    started = subprocess.run(start, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    if accounting and "already" in started.stdout:
        pytest.skip("a local cluster without accounting may be running already: make slurm-down")
    shown = subprocess.run([LOCAL_CLUSTER, "env"], capture_output=True, text=True, check=True).stdout
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", shown.strip().partition("=")[2])
        # One thread, as in the reference runs, because the order of sums depends on it. Jobs inherit this environment.
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        # Timing all-reduces would import torch once more per start; test_nodes.py tests it.
        quick = tmp_path_factory.mktemp("cluster") / "quick.yaml"
        quick.write_text(f"extends: {REPOSITORY}/configs/cluster/slurm.yaml\npreflight_mib: 0\n")
        patch.setenv("MEGAKERNEL_CLUSTER", str(quick))
        yield
    if "already" not in started.stdout:
        subprocess.run([LOCAL_CLUSTER, "stop"], check=True)


@pytest.fixture(scope="module")
def place(cluster, tmp_path_factory):
    """A folder to submit from, with `run.yaml`; the working folder of the module's tests."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        words = "prepare --source stdlib --tokenizer byte --out corpus --max-documents 60 --validation-fraction 0.1"
        assert main([*words.split(), "--workers", "1"]) == 0
        (folder / "run.yaml").write_text(CONFIG)
        yield folder
        subprocess.run(["scancel", "--user=root", "--quiet"], check=False)


@pytest.fixture(autouse=True)
def nodes_that_take_jobs(cluster):
    """A node that a test lost must not affect the next test: warn about nodes that take no jobs, and restart them."""
    for node, state in node_states().items():
        if not takes_jobs(state):
            warnings.warn(f"{node} was {state} before this test; its slurmd was started again", stacklevel=1)
            take_jobs_again(node)


@pytest.fixture
def impatient_slurm(place):
    """A cluster that gives up a node that does not answer after 60 s instead of 300."""
    usual = Path(os.environ["SLURM_CONF"]).read_text()
    configure_slurm(f"{usual}SlurmdTimeout=60\n")
    yield
    configure_slurm(usual)


def configure_slurm(text: str) -> None:
    # Replaced atomically: slurmd reads the file some time after scontrol has ended, and exits if it is incomplete.
    new = Path(os.environ["SLURM_CONF"] + ".new")
    new.write_text(text)
    new.replace(os.environ["SLURM_CONF"])
    scontrol("reconfigure")
