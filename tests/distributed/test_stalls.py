"""A rank that fails or hangs while states are exchanged ends the job, and is named."""

import sys

import pytest

from launch.exit_status import ExitStatus
from launch.local import run_ranks
from tests.distributed.training_run import write_config

RANK = """
import os, sys, time
from megakernel.config import load
from megakernel.parallel.processes import ProcessEnvironment

place = {{name: int(os.environ[name.upper()]) for name in ("rank", "world_size", "local_rank")}}
config = load({config!r}, {overrides!r})
from megakernel.parallel import prepare_device
prepare_device("cpu", place["local_rank"])
from megakernel.parallel import state_exchange

start, calls = state_exchange.Gathered.start, []

def meet_a_fault(self, *arguments):
    calls.append(self)
    # In its third step, whatever the number of layers.
    if place["rank"] == 1 and len(calls) == {call}:
        {fault}
    start(self, *arguments)

state_exchange.Gathered.start = meet_a_fault

from megakernel.training.pretrain import pretrain
sys.exit(pretrain(config, ProcessEnvironment(**place, master_port=int(os.environ["MASTER_PORT"]))))
"""
EXCHANGES = 3
"""Of a forward pass: the model's softmax layer trades heads instead."""


def run_with(fault, corpus, folder):
    """Train on two context ranks of which one meets a fault in its third step; exit status."""
    config = write_config(folder, corpus)
    overrides = (
        "parallel.context=2 parallel.state_exchange=gather parallel.stall_minutes=0.05 training.eval_samples=0 "
        "training.global_batch_size=2"
    )
    script = RANK.format(config=str(config), overrides=overrides.split(), call=2 * EXCHANGES + 2, fault=fault)
    return run_ranks([sys.executable, "-c", script], 2, folder / "logs", grace_seconds=1.0)


@pytest.mark.parametrize("fault", ["time.sleep(600)", "while True: pass"])
def test_a_rank_that_hangs_in_an_exchange_is_named_by_the_others(fault, corpus, tmp_path, capfd):
    assert run_with(fault, corpus, tmp_path) == ExitStatus.STALLED
    said = capfd.readouterr()
    line = next(line for line in said.out.splitlines() + said.err.splitlines() if "no progress" in line)
    assert "rank 1 on " in line
    assert "of step 3, others wait in 'exchange of state'" in line
    # Its own log shows where.
    assert "meet_a_fault" in (tmp_path / "logs" / "rank_1.log").read_text()


def test_a_rank_that_fails_in_an_exchange_is_named_by_the_launcher(corpus, tmp_path, capfd):
    assert run_with("raise ValueError('out of order')", corpus, tmp_path) == 1
    said = capfd.readouterr().err
    assert "rank 1 failed with exit status 1" in said
    assert "out of order" in said
