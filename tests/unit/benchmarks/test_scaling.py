"""The overhead of a job grows linearly with its processes, counted by running the library's code."""

import pytest

from benchmarks import scaling

TASKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """nodes -> counts."""
    return {nodes: scaling.counts(nodes, TASKS) for nodes in (8, 16)}


def test_all_that_is_asked_of_the_store_grows_with_the_processes_alone(found):
    # What the other ranks ask for in a stall goes with the time that they wait: a constant for each, below.
    for name in ("preflight: keys asked of the store", "watchdog: keys that one rank asks for in a stall"):
        assert found[16][name] <= 2.2 * found[8][name], name


def test_a_node_prints_a_line_for_what_it_found_and_one_for_each_all_reduce():
    counts = scaling.preflight_counts(16, TASKS)
    assert counts["preflight: lines"] == 16 * (1 + 4)


def test_srun_keeps_every_line_whole_so_that_no_healthy_node_is_excluded():
    # With names of 8 letters the names of 128 nodes are longer than what srun keeps together.
    counts = scaling.preflight_counts(128, TASKS)
    assert counts["preflight: most bytes of a task"] <= scaling.MESSAGE_BYTES
    excluded = [count for name, count in counts.items() if "excluded" in name]
    assert len(excluded) > 2
    assert not any(excluded)


def test_one_process_reads_for_all_why_the_job_stands_still(found):
    for nodes, ranks in ((8, 8 * TASKS), (16, 16 * TASKS)):
        # Twice what each has told; the others ask for the answer now and then.
        assert 4 * ranks < found[nodes]["watchdog: keys that one rank asks for in a stall"] < 4 * ranks + 40
        assert found[nodes]["watchdog: keys that each other rank asks for"] < 40
        assert found[nodes]["watchdog: different explanations"] == 1


def test_processes_together_tell_no_more_than_a_store_can_hear():
    assert scaling.messages_a_second(8) == 8
    assert scaling.messages_a_second(8192) <= 2048


def test_each_rank_flushes_what_it_wrote(found):
    for counts in found.values():
        assert counts["save: most files flushed by another rank"] == 1
        assert counts["save: files and folders flushed by rank 0"] < 8


def test_a_rank_receives_what_rank_0_found_once(found):
    received = {nodes: found[nodes]["manifest: bytes that a rank receives of it"] for nodes in found}
    # It names a file for each rank.
    assert received[16] <= 2.2 * received[8]


def test_one_cause_leaves_one_event(found):
    assert found[16]["failure: events that one cause leaves"] == 1
