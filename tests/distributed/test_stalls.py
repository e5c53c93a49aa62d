"""A rank that fails or hangs while others wait for it ends the job, and is named."""

import sys

import pytest

from launch.exit_status import ExitStatus
from launch.local import run_ranks
from tests.distributed.training_run import write_config
from tests.tiers import tiered

RANK = """
import os, sys, time
from megakernel.config import load
from megakernel.parallel.processes import ProcessEnvironment

place = {{name: int(os.environ[name.upper()]) for name in ("rank", "world_size", "local_rank")}}
config = load({config!r}, {overrides!r})
from megakernel.parallel import Mesh, prepare_device
prepare_device("cpu", place["local_rank"])
from megakernel.parallel.state_exchange import AllGather

meant, calls = {method}, []

def meet_a_fault(self, *arguments):
    calls.append(self)
    if place["rank"] == 1 and len(calls) == {call}:
        {fault}
    return meant(self, *arguments)

{method} = meet_a_fault

from launch.training import train
sys.exit(train(config, ProcessEnvironment(**place, master_port=int(os.environ["MASTER_PORT"]))))
"""
EXCHANGE = ("AllGather.start", 2 * 3 + 2)
"""In the third step: three layers exchange a state, the softmax layer trades heads instead."""

AGREEMENT = ("Mesh.agree", 3)
"""Behind the last exchange of the third step: whether one of the ranks was asked to stop."""


def run_with(fault, corpus, folder, place=EXCHANGE, limit="parallel.stall_minutes=0.05"):
    """Train on two context ranks of which one meets a fault in a method's N-th call; exit status."""
    method, call = place
    config = write_config(folder, corpus)
    overrides = (
        f"parallel.context=2 parallel.state_exchange=gather {limit} training.eval_samples=0 "
        "training.global_batch_size=2"
    )
    script = RANK.format(
        config=str(config), overrides=overrides.split(), method=method, call=call, fault=fault
    )
    return run_ranks([sys.executable, "-c", script], 2, folder / "logs", grace_seconds=1.0)


def no_progress(capfd):
    """The line in which a rank says whom it waits for."""
    said = capfd.readouterr()
    return next(line for line in said.out.splitlines() + said.err.splitlines() if "no progress" in line)


@pytest.mark.parametrize("fault", tiered(["time.sleep(600)", "while True: pass"], ["time.sleep(600)"]))
def test_a_rank_that_hangs_in_an_exchange_is_named_by_the_others(fault, corpus, tmp_path, capfd):
    assert run_with(fault, corpus, tmp_path) == ExitStatus.STALLED
    line = no_progress(capfd)
    assert "rank 1 on " in line
    assert "of step 3, others wait in 'exchange of state'" in line
    # Its own log shows where.
    assert "meet_a_fault" in (tmp_path / "logs" / "rank_1.log").read_text()


@pytest.mark.second
def test_a_rank_that_stops_between_two_steps_is_named_by_the_others(corpus, tmp_path, capfd):
    # It does not watch over itself any more, as one that sleeps does.
    stop = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    assert run_with(stop, corpus, tmp_path, AGREEMENT) == ExitStatus.STALLED
    line = no_progress(capfd)
    assert "rank 1 on " in line
    assert "no longer answers" in line


@pytest.mark.second
def test_a_rank_that_fails_in_an_exchange_is_named_by_the_launcher(corpus, tmp_path, capfd):
    # With the limit that ships: on a busy machine a rank that fails may take seconds to leave.
    assert run_with("raise ValueError('out of order')", corpus, tmp_path, limit="") == 1
    said = capfd.readouterr().err
    assert "rank 1 failed with exit status 1" in said
    assert "out of order" in said
