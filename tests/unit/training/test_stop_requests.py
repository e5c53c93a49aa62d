import os
import signal
import subprocess
import sys
import textwrap

import pytest

from megakernel.training.stop_requests import SAME_KEYPRESS_SECONDS, Stop, StopRequests


def send(number: int) -> None:
    # CPython runs the handler before kill() returns when a thread signals itself.
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGUSR1, 85),
        (signal.SIGUSR2, 85),
        (signal.SIGINT, 85),
        (signal.SIGHUP, 143),
        (signal.SIGTERM, 143),
    ],
)
def test_a_pending_signal_has_the_exit_status_that_the_launcher_expects(number, status):
    with StopRequests() as requests:
        assert requests.pending() is Stop.NONE
        send(number)
        assert requests.pending().name == signal.Signals(number).name
        assert requests.pending().exit_status == status


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequests() as requests:
        send(signal.SIGHUP)
        assert requests.pending() is Stop.NONE
    signal.signal(signal.SIGHUP, before)


def test_the_exit_status_without_a_request_is_zero():
    assert Stop.NONE.exit_status == 0


def test_sigterm_has_priority_over_preemption_in_either_order():
    for order in [(signal.SIGUSR2, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR2)]:
        with StopRequests() as requests:
            for number in order:
                send(number)
            assert requests.pending() is Stop.SIGTERM


def test_signals_after_the_ranks_agreed_do_not_change_the_status():
    with StopRequests() as requests:
        send(signal.SIGUSR2)
        requests.accept(Stop.SIGUSR2)
        send(signal.SIGTERM)
        assert requests.pending() is Stop.SIGUSR2


def test_a_rank_without_a_signal_takes_the_agreed_reason():
    with StopRequests() as requests:
        requests.accept(Stop.SIGTERM)
        assert requests.pending().exit_status == 143


def test_earlier_signal_handlers_are_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with StopRequests():
        assert all(signal.getsignal(number) != handler for number, handler in before.items())
    assert all(signal.getsignal(number) == handler for number, handler in before.items())


def test_one_ctrl_c_that_arrives_twice_is_one_request():
    now = [100.0]
    with StopRequests(clock=lambda: now[0]) as requests:
        send(signal.SIGINT)
        now[0] += SAME_KEYPRESS_SECONDS / 2
        send(signal.SIGINT)
        assert requests.pending() is Stop.SIGINT


def test_a_second_ctrl_c_ends_the_process_at_once_even_while_saving():
    script = """
        import os, signal
        from megakernel.training.stop_requests import Stop
        from megakernel.training.stop_requests import StopRequests
        now = [0.0]
        with StopRequests(clock=lambda: now[0]) as requests:
            os.kill(os.getpid(), signal.SIGINT)
            requests.accept(Stop.SIGINT)
            now[0] = 5.0
            os.kill(os.getpid(), signal.SIGINT)
            print("still here")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""


def test_a_stop_file_ends_the_run_and_is_removed_after_saving(tmp_path):
    stop_file = tmp_path / "STOP"
    with StopRequests(stop_file) as requests:
        assert requests.pending() is Stop.NONE
        stop_file.touch()
        assert requests.pending().exit_status == 143
        requests.accept(Stop.STOP_FILE)
        assert stop_file.exists(), "a save that fails must leave the request"
        requests.saved()
        assert not stop_file.exists()


def test_a_stop_file_written_during_a_preemption_save_waits_for_the_requeued_job(tmp_path):
    stop_file = tmp_path / "STOP"
    with StopRequests(stop_file) as requests:
        send(signal.SIGUSR2)
        requests.accept(requests.pending())
        stop_file.touch()
        requests.saved()
        assert stop_file.exists()


def test_a_preemption_signal_stays_pending_until_the_loop_handles_it():
    # In a process of its own: other threads of this one do not have the signal mask, and the signal would end them all.
    script = """
        import os, signal
        from megakernel.training.stop_requests import StopRequests, block_stop_signals
        block_stop_signals()
        os.kill(os.getpid(), signal.SIGUSR2)
        with StopRequests() as requests:
            print(requests.pending().name)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "SIGUSR2\n")


@pytest.mark.parametrize("started", ["before", "inside"])
def test_a_preemption_signal_after_the_last_step_does_not_end_the_process(started):
    """Not even if a thread of the loop, such as autograd's, does not block it."""
    script = f"""
        import os, signal, threading, time
        from megakernel.training.stop_requests import StopRequests, block_stop_signals
        thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        block_stop_signals()
        if "{started}" == "before":
            thread.start()
        with StopRequests():
            if "{started}" == "inside":
                thread.start()
        os.kill(os.getpid(), signal.SIGUSR1)
        with StopRequests() as requests:
            while not requests.pending():  # the other thread forwards the signal when it runs
                time.sleep(0.01)
            print(requests.pending().name)
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.1)
        print("done", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "SIGUSR1\ndone\n")
