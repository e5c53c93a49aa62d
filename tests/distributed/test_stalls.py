"""A rank that fails or hangs while others wait for it ends the job, and is named in the error."""

import sys

import pytest

from launch.exit_status import ExitStatus
from launch.local import run_ranks
from tests.distributed.training_run import write_config

pytestmark = pytest.mark.second

RANK = """
import os, sys, time
from megakernel.config import load
from megakernel.parallel.processes import ProcessEnvironment

ranks = {{name: int(os.environ[name.upper()]) for name in ("rank", "world_size", "local_rank")}}
config = load({config!r}, {overrides!r})
from megakernel.parallel import Mesh, prepare_device
prepare_device("cpu", ranks["local_rank"])
from megakernel.parallel.state_exchange import AllGather

original, calls = {method}, []

def meet_a_fault(self, *arguments):
    calls.append(self)
    if ranks["rank"] == 1 and len(calls) == {call}:
        {fault}
    return original(self, *arguments)

{method} = meet_a_fault

from launch.training import train
sys.exit(train(config, ProcessEnvironment(**ranks, master_port=int(os.environ["MASTER_PORT"]))))
"""
EXCHANGE = ("AllGather.start", 2 * 3 + 2)
"""Method, and its call in the third step: three layers exchange a state; the softmax layer uses Ulysses."""

AGREEMENT = ("Mesh.all_reduce_max", 3)
"""After the last exchange of the third step: whether one of the ranks was asked to stop."""


def run_with(fault, corpus, folder, call_site=EXCHANGE, limit="parallel.stall_minutes=0.1"):
    """Train on two context ranks; rank 1 runs `fault` in the N-th call of a method. Returns the exit status."""
    method, call = call_site
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
    """The line in which a rank names the rank that it waits for."""
    output = capfd.readouterr()
    return next(line for line in output.out.splitlines() + output.err.splitlines() if "no progress" in line)


@pytest.mark.parametrize("fault", ["time.sleep(600)", "while True: pass"])
def test_a_rank_that_hangs_in_an_exchange_is_named_by_the_waiting_ranks(fault, corpus, tmp_path, capfd):
    assert run_with(fault, corpus, tmp_path) == ExitStatus.STALLED
    line = no_progress(capfd)
    assert "rank 1 on " in line
    assert "of step 3, others wait in 'exchange of state'" in line
    # Its own log shows its stack.
    assert "meet_a_fault" in (tmp_path / "logs" / "rank_1.log").read_text()


def test_a_rank_that_stops_between_two_steps_is_named_by_the_waiting_ranks(corpus, tmp_path, capfd):
    # Unlike a rank that sleeps, a stopped one runs no watchdog thread.
    stop = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    assert run_with(stop, corpus, tmp_path, AGREEMENT) == ExitStatus.STALLED
    line = no_progress(capfd)
    assert "rank 1 on " in line
    assert "no longer answers" in line


def test_a_rank_that_fails_in_an_exchange_is_named_by_the_launcher(corpus, tmp_path, capfd):
    # With the default limit: on a busy machine a failing rank may take seconds to exit.
    assert run_with("raise ValueError('out of order')", corpus, tmp_path, limit="") == 1
    output = capfd.readouterr().err
    assert "rank 1 failed with exit status 1" in output
    assert "out of order" in output
