import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megakernel.parallel.progress import Progress, laggards
from megakernel.training import watchdog
from megakernel.training.watchdog import STALLED, Watchdog, stall_message


@pytest.mark.parametrize(
    ("progress_of_ranks", "late"),
    [
        # Rank 1 has recorded fewer events than the others.
        ([Progress(4, 9, "backward"), Progress(4, 7, "forward"), Progress(4, 9, "backward")], [1]),
        # It has begun the same exchange but is not waiting, unlike the others.
        ([Progress(4, 9, "exchange of state", waits=True), Progress(4, 9, "exchange of state")], [1]),
        # It has recorded more events than the rank that waits: another pipeline stage.
        ([Progress(4, 20, "exchange of state", waits=True), Progress(4, 30, "backward")], [1]),
        # A rank with fewer steps is late whatever else is true.
        ([Progress(5, 12, "forward"), Progress(4, 11, "exchange of state", waits=True)], [1]),
        # No rank differs from the others.
        ([Progress(4, 9, "optimizer"), Progress(4, 9, "optimizer")], [0, 1]),
        ([Progress(4, 9, "exchange of state", waits=True)] * 2, [0, 1]),
    ],
)
def test_ranks_that_the_others_wait_for_are_reported_late(progress_of_ranks, late):
    assert laggards(dict(enumerate(progress_of_ranks))) == late


def test_the_stall_message_names_late_ranks_and_what_the_others_wait_for():
    waiting = Progress(4, 9, "exchange of state", waits=True)
    line = stall_message({0: waiting, 1: Progress(4, 7, "forward")}, 300.0, {0: "n1", 1: "n2"})
    assert line == (
        "no progress for 300 s: rank 1 on n2 has come to 'forward' of step 5, others wait in 'exchange of state'"
    )


def test_no_rank_is_blamed_if_all_are_at_the_same_point():
    line = stall_message(dict.fromkeys((0, 1), Progress(4, 9, "optimizer")), 60.0, {0: "n1", 1: "n1"})
    assert line == "no progress for 60 s: all ranks have come to 'optimizer' of step 5"


def test_a_silent_rank_is_blamed():
    progress_of_ranks = {rank: Progress(step=4, events=9, place="backward") for rank in range(2)}
    message = stall_message(progress_of_ranks, 12.0, {0: "a", 1: "b"}, silent=[1])
    assert (
        message == "no progress for 12 s: rank 1 on b no longer answers, and was last in 'backward' of step 5"
    )


def test_only_the_first_of_thousands_of_late_ranks_are_named():
    progress_of_ranks = {rank: Progress(4, 9, "forward") for rank in range(4000)} | {
        4000: Progress(4, 10, "backward")
    }
    message = stall_message(progress_of_ranks, 12.0, dict.fromkeys(progress_of_ranks, "n1"))
    assert "rank 0 on n1, 1 on n1, " in message
    assert ", 15 on n1 and 3984 more has come to 'forward'" in message


@dataclass
class FakeMesh:
    """The attributes of a mesh that the watchdog uses."""

    rank: int = 0
    world_size: int = 1
    progress: Progress = field(default_factory=lambda: Progress(4, 9, "forward"))
    store: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@pytest.mark.parametrize(("device", "limit"), [("cpu", 60.0), ("cuda", 240.0)])
def test_on_a_gpu_a_step_may_show_no_progress_for_as_long_as_the_last_one_took(device, limit, monkeypatch):
    dog = Watchdog(FakeMesh(device=torch.device(device)), start_minutes=10, stall_minutes=1)
    now = 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    with dog.step(0):
        now = 120.0
    assert dog._limit == limit
    with dog.step(1):
        now += 3.0
    assert dog._limit == 60.0
    with dog.step(2):
        now += 3600.0
    dog.expect_slow_step()
    assert dog._limit == (7200.0 if device == "cuda" else 600.0)


def test_rank_0_writes_its_progress_to_the_heartbeat_file(tmp_path):
    with Watchdog(FakeMesh(), 10, 10, tmp_path, lambda: {"slowest": {"rank": 3, "host": "n2"}}):
        deadline = time.monotonic() + 10
        while not (file := tmp_path / "heartbeat.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        heartbeat = json.loads(file.read_text())
    assert (heartbeat["process"], heartbeat["slowest"]) == (os.getpid(), {"rank": 3, "host": "n2"})
    assert (heartbeat["step"], heartbeat["place"], heartbeat["waits"]) == (4, "forward", False)
    assert abs(heartbeat["time"] - time.time()) < 60
    with Watchdog(FakeMesh(rank=1), 10, 10, tmp_path / "other"):
        assert not (tmp_path / "other").exists()


class ProcessExit(BaseException):
    """Raised in place of ending the process."""


@pytest.fixture
def exits(monkeypatch):
    """The exit statuses of processes and their last messages."""
    statuses, messages = [], []

    def record_exit(status):
        statuses.append(status)
        raise ProcessExit

    monkeypatch.setattr(os, "_exit", record_exit)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda **_: None)
    monkeypatch.setattr(watchdog, "print", lambda line, **_: messages.append(line), raising=False)
    return statuses, messages


def exit_stalled(watchdog):
    with pytest.raises(ProcessExit):
        watchdog._exit_stalled()


def test_one_rank_diagnoses_the_stall_and_all_report_it(exits):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meshes = [FakeMesh(rank, 4, store=store) for rank in range(4)]
    meshes[1].progress = Progress(4, 7, "loading data")
    watchdogs = [Watchdog(mesh, 10, 0.05) for mesh in meshes[:3]]  # the last rank never reports
    for dog in watchdogs:
        dog._report()
    with ThreadPoolExecutor(2) as pool:  # and the one before it has stopped reporting
        list(pool.map(exit_stalled, watchdogs[:2]))
    statuses, messages = exits
    assert statuses == [STALLED] * 2
    assert len(set(messages)) == 1
    assert "rank 2 on " in messages[0]
    assert "3 on an unknown node no longer answers, and was last in 'forward' of step 5" in messages[0]


def test_a_rank_exits_even_if_the_store_or_the_diagnosing_rank_is_gone(exits):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = Watchdog(FakeMesh(1, 2, store=store), 10, 0.001)
    store.add("megakernel/stalled/asked", 1)
    exit_stalled(dog)
    statuses, messages = exits
    assert statuses == [STALLED]
    assert messages == [
        "error: no progress for 600 s in 'forward'; see what other ranks say, this one cannot ask"
    ]
