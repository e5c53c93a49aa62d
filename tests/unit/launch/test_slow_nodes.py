from dataclasses import replace

import pytest

from launch.slurm.slow_nodes import Timing, rounds, slow_nodes, summary


def timings(seconds, broken=None):
    """Timings of one process per node. seconds: group of nodes -> duration. broken: node whose groups all fail."""
    return [
        Timing(0, node, nodes, *((None, f"{node} waited") if broken in nodes else (slow, None)))
        for nodes, slow in ((group.split("-"), slow) for group, slow in seconds.items())
        for node in nodes
    ]


FOUR = {"a": 1, "b": 1, "c": 1, "d": 1, "a-b": 1, "c-d": 1, "b-c": 1, "d-a": 1, "a-b-c-d": 1}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_each_node_is_in_a_round_once_and_paired_with_two_others(count):
    nodes = [f"n{number}" for number in range(count)]
    planned = rounds(nodes)
    for groups in planned:
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members))
    pairs = [tuple(sorted(group)) for groups in planned for group in groups if len(group) == 2]
    assert len(pairs) == len(set(pairs)) == (count if count > 2 else count - 1)
    assert planned[0] == [[node] for node in nodes]
    assert planned[-1] == [nodes]
    assert len(planned) <= 5


@pytest.mark.parametrize(
    ("slow", "why"),
    [
        ([], {}),
        (["a-b-c-d"], {}),  # no particular node
        (["a-b"], {}),  # each is fast with its other neighbour
        (["b", "a-b", "b-c"], {"b": "an all-reduce of its own processes takes 5 s"}),
        (["a-b", "b-c", "a-b-c-d"], {"b": "an all-reduce with a takes 5 s"}),
    ],
    ids=["none", "all together", "one pair", "alone", "with both neighbours"],
)
def test_a_node_that_is_slow_in_all_its_groups_is_to_blame(slow, why):
    assert slow_nodes(timings(FOUR | dict.fromkeys(slow, 5)), limit=2) == why


def test_the_group_of_all_nodes_needs_no_names():
    named = timings(FOUR | {"c": 5}) + timings({"a-b-c-d": 9})
    unnamed = [replace(one, nodes=[]) if len(one.nodes) == 4 else one for one in named]
    assert list(summary(unnamed)) == list(summary(named))
    left = [one for one in unnamed if one.nodes or one.node != "b"]
    assert slow_nodes(left, limit=6) == {"b": "its processes ended in an all-reduce with other nodes"}


def test_a_slow_pair_blames_both_nodes_unless_one_is_already_unfit():
    pair = timings({"a": 1, "b": 1, "a-b": 5})
    assert set(slow_nodes(pair, limit=2)) == {"a", "b"}
    assert slow_nodes(pair, limit=2, already_unfit=["a"]) == {}


def test_a_failure_is_reported_with_the_failing_nodes_own_error():
    assert slow_nodes(timings(FOUR, broken="c"), limit=2) == {
        "c": "an all-reduce of its own processes fails (c waited)"
    }


def test_a_node_that_exited_is_distinguished_from_those_waiting_for_it():
    alone = dict.fromkeys("abcd", 1)
    first = timings(alone | {"a-b": 1, "c-d": 1}, broken="b")
    left = [one for one in first if one.node != "b"]
    assert slow_nodes(left, limit=2) == {"b": "its processes ended in an all-reduce with other nodes"}


def test_the_summary_names_the_slowest_all_reduce_of_each_kind():
    assert list(summary(timings(FOUR | {"c": 2, "a-b": 5}))) == [
        "the slowest all-reduce within a node takes 2 s (c)",
        "the slowest all-reduce between two nodes takes 5 s (a, b)",
        "the slowest all-reduce over all nodes takes 1 s",
    ]
