"""Finds slow and failing nodes by all-reduces within nodes, between pairs of nodes, and over all.

In an all-reduce all wait for the slowest, so one over all nodes shows that something is slow, but not what. One between
two nodes points to the pair; a node that is slow with both neighbors is the cause.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """How long an all-reduce took one process."""

    rank: int
    node: str

    nodes: list[str]
    """The nodes that took part: its own, or its own and a neighbor; empty for all nodes, to keep the lines of large
    jobs short."""

    seconds: float | None
    """None if it failed."""

    error: str | None = None
    """Why it failed."""


def rounds(nodes: Sequence[str]) -> list[list[list[str]]]:
    """The node groups of each round of all-reduces: each node alone, pairs of neighbors in a ring, all together.

    No node is twice in a round. With three or more nodes every node is in two pairs.
    """
    pairs = [[nodes[at], nodes[(at + 1) % len(nodes)]] for at in range(len(nodes))]
    if len(nodes) < 3:
        pairs = pairs[: len(nodes) - 1]
    whole = len(pairs) - len(pairs) % 2  # in an odd ring the last pair gets a round of its own
    planned = [
        [[node] for node in nodes],
        pairs[:whole:2],
        pairs[1:whole:2],
        pairs[whole:],
        [list(nodes)] if len(nodes) > 2 else [],
    ]
    return [groups for groups in planned if groups]


def slow_nodes(timings: Iterable[Timing], limit: float, already_unfit: Iterable[str] = ()) -> dict[str, str]:
    """Nodes that make all-reduces fail or last longer than `limit` seconds -> why.

    already_unfit: nodes that are unfit for another reason, which already explains their slow pairs.
    """
    by_group = _by_group(timings)
    bad: dict[str, str] = {}
    for group, result in by_group.items():
        if len(group) == 1 and result.seconds > limit:
            bad[group[0]] = f"an all-reduce of its own processes {result.describe(group[0])}"
        bad |= dict.fromkeys(result.silent, "its processes ended in an all-reduce with other nodes")
    explained = {*already_unfit, *bad}
    pairs = {
        group: result
        for group, result in by_group.items()
        if len(group) == 2 and not explained.intersection(group)
    }
    for node in dict.fromkeys(node for group in pairs for node in group):
        pairs_of_node = {group: result for group, result in pairs.items() if node in group}
        if all(result.seconds > limit for result in pairs_of_node.values()):
            group, slowest = max(pairs_of_node.items(), key=lambda pair: pair[1].seconds)
            other = next(name for name in group if name != node)
            bad[node] = f"an all-reduce with {other} {slowest.describe(node)}"
    return bad


def summary(timings: Iterable[Timing]) -> Iterator[str]:
    """One line for each kind of all-reduce: the slowest one and its nodes."""
    slowest: dict[str, tuple[tuple[str, ...], _AllReduce]] = {}
    for group, result in _by_group(timings).items():
        kind = {1: "within a node", 2: "between two nodes"}.get(len(group), "over all nodes")
        if kind not in slowest or result.seconds > slowest[kind][1].seconds:
            slowest[kind] = group, result
    for kind, (group, result) in slowest.items():
        nodes = f" ({', '.join(group)})" if len(group) < 3 else ""
        yield f"the slowest all-reduce {kind} {result.describe(group[0])}{nodes}"


@dataclass(frozen=True)
class _AllReduce:
    """The timings of one all-reduce, over its processes."""

    seconds: float
    """The longest; infinite if one failed."""

    errors: Mapping[str, str]
    """Node -> the first error of its processes."""

    silent: Sequence[str] = ()
    """Nodes without any timing."""

    def describe(self, node: str) -> str:
        """The duration, or the error of `node`, else of another node."""
        if not self.errors:
            return f"takes {self.seconds:.3g} s"
        return f"fails ({self.errors.get(node) or next(iter(self.errors.values()))})"


def _by_group(timings: Iterable[Timing]) -> Mapping[tuple[str, ...], _AllReduce]:
    timings = list(timings)
    all_nodes = tuple(dict.fromkeys(name for timing in timings for name in (timing.node, *timing.nodes)))
    by_group: dict[tuple[str, ...], list[Timing]] = {}
    for timing in timings:
        by_group.setdefault(tuple(timing.nodes) or all_nodes, []).append(timing)
    return {group: _combine(group, timings) for group, timings in by_group.items()}


def _combine(group: Sequence[str], timings: Sequence[Timing]) -> _AllReduce:
    errors: dict[str, str] = {}
    for timing in timings:
        if timing.seconds is None:
            errors.setdefault(timing.node, timing.error or "no reason given")
    reporting = {timing.node for timing in timings}
    silent = [node for node in group if node not in reporting]
    seconds = float("inf") if errors else max(timing.seconds or 0.0 for timing in timings)
    return _AllReduce(seconds, errors, silent)
