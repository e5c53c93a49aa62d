import json
import os
import time
from dataclasses import dataclass, field

import pytest

from megakernel.parallel.progress import Progress, laggards
from megakernel.training.watchdog import Watchdog, stalled


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
    line = stalled({0: waiting, 1: Progress(4, 7, "forward")}, 300.0, {0: "n1", 1: "n2"})
    assert line == (
        "no progress for 300 s: rank 1 on n2 has come to 'forward' of step 5, others wait in 'exchange of state'"
    )


def test_where_all_stand_alike_no_rank_is_blamed():
    line = stalled(dict.fromkeys((0, 1), Progress(4, 9, "optimizer")), 60.0, {0: "n1", 1: "n1"})
    assert line == "no progress for 60 s: all ranks have come to 'optimizer' of step 5"


def test_a_rank_that_tells_nothing_any_more_is_the_one():
    everywhere = {rank: Progress(step=4, events=9, place="backward") for rank in range(2)}
    said = stalled(everywhere, 12.0, {0: "a", 1: "b"}, silent=[1])
    assert said == "no progress for 12 s: rank 1 on b no longer answers, and was last in 'backward' of step 5"


@dataclass
class Place:
    """What the watchdog asks of a mesh whose processes are this one alone."""

    rank: int = 0
    world_size: int = 1
    progress: Progress = field(default_factory=lambda: Progress(4, 9, "forward"))


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
