import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from megakernel.parallel.progress import Progress, laggards
from megakernel.training import watchdog
from megakernel.training.watchdog import STALLED, Watchdog, stall_message


@pytest.mark.parametrize(
    ("everywhere", "late"),
    [
        # Rank 1 has not come as far as the others.
        ([Progress(4, 9, "backward"), Progress(4, 7, "forward"), Progress(4, 9, "backward")], [1]),
        # It has begun the same exchange, but works while the others wait.
        ([Progress(4, 9, "exchange of state", waits=True), Progress(4, 9, "exchange of state")], [1]),
        # A rank that has come further before it waits: another stage of a pipeline.
        ([Progress(4, 20, "exchange of state", waits=True), Progress(4, 30, "backward")], [1]),
        # Fewer steps count before anything else.
        ([Progress(5, 12, "forward"), Progress(4, 11, "exchange of state", waits=True)], [1]),
        # Nothing tells them apart.
        ([Progress(4, 9, "optimizer"), Progress(4, 9, "optimizer")], [0, 1]),
        ([Progress(4, 9, "exchange of state", waits=True)] * 2, [0, 1]),
    ],
)
def test_those_are_late_for_whom_the_others_wait(everywhere, late):
    assert laggards(dict(enumerate(everywhere))) == late


def test_one_line_says_who_stands_where():
    waiting = Progress(4, 9, "exchange of state", waits=True)
    line = stall_message({0: waiting, 1: Progress(4, 7, "forward")}, 300.0, {0: "n1", 1: "n2"})
    assert line == (
        "no progress for 300 s: rank 1 on n2 has come to 'forward' of step 5, others wait in 'exchange of state'"
    )


def test_where_all_stand_alike_no_rank_is_blamed():
    line = stall_message(dict.fromkeys((0, 1), Progress(4, 9, "optimizer")), 60.0, {0: "n1", 1: "n1"})
    assert line == "no progress for 60 s: all ranks have come to 'optimizer' of step 5"


def test_a_rank_that_tells_nothing_any_more_is_the_one():
    everywhere = {rank: Progress(step=4, events=9, place="backward") for rank in range(2)}
    said = stall_message(everywhere, 12.0, {0: "a", 1: "b"}, silent=[1])
    assert said == "no progress for 12 s: rank 1 on b no longer answers, and was last in 'backward' of step 5"


def test_of_thousands_of_ranks_the_first_are_named():
    everywhere = {rank: Progress(4, 9, "forward") for rank in range(4000)} | {
        4000: Progress(4, 10, "backward")
    }
    said = stall_message(everywhere, 12.0, dict.fromkeys(everywhere, "n1"))
    assert "rank 0 on n1, 1 on n1, " in said
    assert ", 15 on n1 and 3984 more has come to 'forward'" in said


@dataclass
class Place:
    """What the watchdog asks of a mesh."""

    rank: int = 0
    world_size: int = 1
    progress: Progress = field(default_factory=lambda: Progress(4, 9, "forward"))
    store: Any = None


def test_the_first_process_tells_the_folder_where_it_is(tmp_path):
    with Watchdog(Place(), 10, 10, tmp_path, lambda: {"rank": 3, "host": "n2"}):
        deadline = time.monotonic() + 10
        while not (file := tmp_path / "heartbeat.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        told = json.loads(file.read_text())
    assert (told["process"], told["slowest"]) == (os.getpid(), {"rank": 3, "host": "n2"})
    assert (told["step"], told["place"], told["waits"]) == (4, "forward", False)
    assert abs(told["time"] - time.time()) < 60
    with Watchdog(Place(rank=1), 10, 10, tmp_path / "other"):
        assert not (tmp_path / "other").exists()


class Left(BaseException):
    """In place of the end of a process."""


@pytest.fixture
def ended(monkeypatch):
    """Exit statuses of processes, and what they said last."""
    statuses, said = [], []

    def leave(status):
        statuses.append(status)
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda **_: None)
    monkeypatch.setattr(watchdog, "print", lambda line, **_: said.append(line), raising=False)
    return statuses, said


def end(dog):
    with pytest.raises(Left):
        dog._exit_stalled()


def test_one_rank_reads_why_all_stand_still_and_all_say_it(ended):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [Place(rank, 4, store=store) for rank in range(4)]
    places[1].progress = Progress(4, 7, "loading data")
    dogs = [Watchdog(place, 10, 0.01) for place in places[:3]]  # the last tells nothing, ever
    for dog in dogs:
        dog._report()
    with ThreadPoolExecutor(2) as pool:  # and the one before it nothing any more
        list(pool.map(end, dogs[:2]))
    statuses, said = ended
    assert statuses == [STALLED] * 2
    assert len(set(said)) == 1
    assert "rank 2 on " in said[0]
    assert "3 on an unknown node no longer answers, and was last in 'forward' of step 5" in said[0]


def test_a_rank_leaves_where_the_store_or_whoever_asked_first_is_gone(ended):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dog = Watchdog(Place(1, 2, store=store), 10, 0.001)
    store.add("megakernel/stalled/asked", 1)
    end(dog)
    statuses, said = ended
    assert statuses == [STALLED]
    assert said == [
        "error: no progress for 600 s in 'forward'; see what other ranks say, this one cannot ask"
    ]
