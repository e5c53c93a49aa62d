from dataclasses import replace

import pytest

from launch.slurm.slow_nodes import Timing, rounds, slow_nodes, summary


def found(seconds, broken=None):
    """A process on each node; seconds: by the names of the nodes of a group; broken: of whom all fail."""
    return [
        Timing(0, node, nodes, *((None, f"{node} waited") if broken in nodes else (slow, None)))
        for nodes, slow in ((group.split("-"), slow) for group, slow in seconds.items())
        for node in nodes
    ]


FOUR = {"a": 1, "b": 1, "c": 1, "d": 1, "a-b": 1, "c-d": 1, "b-c": 1, "d-a": 1, "a-b-c-d": 1}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_each_node_is_once_in_a_round_and_meets_two_others(count):
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
        (["a-b-c-d"], {}),  # nobody in particular
        (["a-b"], {}),  # each is fast with its other neighbour
        (["b", "a-b", "b-c"], {"b": "an all-reduce of its own processes takes 5 s"}),
        (["a-b", "b-c", "a-b-c-d"], {"b": "an all-reduce with a takes 5 s"}),
    ],
    ids=["none", "all together", "one pair", "alone", "with both neighbours"],
)
def test_who_is_slow_with_everybody_is_to_blame(slow, why):
    assert slow_nodes(found(FOUR | dict.fromkeys(slow, 5)), limit=2) == why


def test_all_nodes_need_no_names():
    named = found(FOUR | {"c": 5}) + found({"a-b-c-d": 9})
    unnamed = [replace(one, nodes=[]) if len(one.nodes) == 4 else one for one in named]
    assert list(summary(unnamed)) == list(summary(named))
    left = [one for one in unnamed if one.nodes or one.node != "b"]
    assert slow_nodes(left, limit=6) == {"b": "its processes ended in an all-reduce with other nodes"}


def test_of_two_nodes_that_are_slow_together_neither_can_be_told_unless_another_reason_is_known():
    pair = found({"a": 1, "b": 1, "a-b": 5})
    assert set(slow_nodes(pair, limit=2)) == {"a", "b"}
    assert slow_nodes(pair, limit=2, already_unfit=["a"]) == {}


def test_a_failure_is_told_as_the_node_itself_met_it():
    assert slow_nodes(found(FOUR, broken="c"), limit=2) == {
        "c": "an all-reduce of its own processes fails (c waited)"
    }


def test_a_node_that_ends_on_the_way_is_told_from_those_that_waited_for_it():
    alone = dict.fromkeys("abcd", 1)
    first = found(alone | {"a-b": 1, "c-d": 1}, broken="b")
    left = [one for one in first if one.node != "b"]
    assert slow_nodes(left, limit=2) == {"b": "its processes ended in an all-reduce with other nodes"}


def test_the_slowest_of_each_kind_is_summed_up():
    assert list(summary(found(FOUR | {"c": 2, "a-b": 5}))) == [
        "the slowest all-reduce within a node takes 2 s (c)",
        "the slowest all-reduce between two nodes takes 5 s (a, b)",
        "the slowest all-reduce over all nodes takes 1 s",
    ]
