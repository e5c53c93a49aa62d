"""Which nodes hold the others up, or fail them: read off all-reduces within nodes, between pairs of them, and over all.

In an all-reduce everybody waits for the slowest, so one over all nodes tells that something is slow, not what. Between
two nodes it blames the pair; whoever is slow with each of its neighbours is the cause.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """How long an all-reduce took one process."""

    rank: int
    node: str

    nodes: list[str]
    """Those whose processes took part: its own alone, or its own and a neighbour; empty where all did, so that a line
    about a thousand nodes is no longer than one about two."""

    seconds: float | None
    """None where it failed."""

    error: str | None = None
    """Why it did."""


def rounds(nodes: Sequence[str]) -> list[list[list[str]]]:
    """Who sums up with whom, one round after the other: each node alone, with each of two neighbours, all together.

    No node is twice in a round. The neighbours make a ring, so that every node of three or more is in two pairs.
    """
    pairs = [[nodes[at], nodes[(at + 1) % len(nodes)]] for at in range(len(nodes))]
    if len(nodes) < 3:
        pairs = pairs[: len(nodes) - 1]
    whole = len(pairs) - len(pairs) % 2  # of an odd ring the last pair has a round of its own
    planned = [
        [[node] for node in nodes],
        pairs[:whole:2],
        pairs[1:whole:2],
        pairs[whole:],
        [list(nodes)] if len(nodes) > 2 else [],
    ]
    return [groups for groups in planned if groups]


def slow_nodes(timings: Iterable[Timing], limit: float, known: Iterable[str] = ()) -> dict[str, str]:
    """Node -> why, of those that make all-reduces fail or last longer than `limit` seconds.

    known: nodes that are not fit for another reason, which explains what is slow between them and others.
    """
    measured = _measured(timings)
    bad: dict[str, str] = {}
    for group, found in measured.items():
        if len(group) == 1 and found.is_slow(limit):
            bad[group[0]] = f"an all-reduce of its own processes {found.of(group[0])}"
        bad |= dict.fromkeys(found.silent, "its processes ended in an all-reduce with other nodes")
    explained = {*known, *bad}
    pairs = {
        group: found
        for group, found in measured.items()
        if len(group) == 2 and not explained.intersection(group)
    }
    for node in dict.fromkeys(node for group in pairs for node in group):
        own = {group: found for group, found in pairs.items() if node in group}
        if all(found.is_slow(limit) for found in own.values()):
            group, found = max(own.items(), key=lambda pair: pair[1].seconds)
            other = next(name for name in group if name != node)
            bad[node] = f"an all-reduce with {other} {found.of(node)}"
    return bad


def summary(timings: Iterable[Timing]) -> Iterator[str]:
    """A line for each kind of all-reduce: the slowest, and whose it was."""
    slowest: dict[str, tuple[tuple[str, ...], _Group]] = {}
    for group, found in _measured(timings).items():
        kind = {1: "within a node", 2: "between two nodes"}.get(len(group), "over all nodes")
        if kind not in slowest or found.seconds > slowest[kind][1].seconds:
            slowest[kind] = group, found
    for kind, (group, found) in slowest.items():
        whose = f" ({', '.join(group)})" if len(group) < 3 else ""
        yield f"the slowest all-reduce {kind} {found.of(group[0])}{whose}"


@dataclass(frozen=True)
class _Group:
    """What the processes of some nodes found together."""

    seconds: float
    """Of the slowest; infinite where one failed."""

    errors: Mapping[str, str]
    """Node -> the first that its processes met."""

    silent: Sequence[str] = ()
    """Nodes none of whose processes came back to tell."""

    def is_slow(self, limit: float) -> bool:
        return self.seconds > limit

    def of(self, node: str) -> str:
        """What happened to it there: others only know that they have waited."""
        if not self.errors:
            return f"takes {self.seconds:.3g} s"
        return f"fails ({self.errors.get(node) or next(iter(self.errors.values()))})"


def _measured(timings: Iterable[Timing]) -> Mapping[tuple[str, ...], _Group]:
    timings = list(timings)
    everybody = tuple(dict.fromkeys(name for timing in timings for name in (timing.node, *timing.nodes)))
    found: dict[tuple[str, ...], list[Timing]] = {}
    for timing in timings:
        found.setdefault(tuple(timing.nodes) or everybody, []).append(timing)
    return {group: _together(group, timings) for group, timings in found.items()}


def _together(group: Sequence[str], timings: Sequence[Timing]) -> _Group:
    errors: dict[str, str] = {}
    for timing in timings:
        if timing.seconds is None:
            errors.setdefault(timing.node, timing.error or "no reason given")
    heard = {timing.node for timing in timings}
    silent = [node for node in group if node not in heard]
    seconds = float("inf") if errors else max(timing.seconds or 0.0 for timing in timings)
    return _Group(seconds, errors, silent)
