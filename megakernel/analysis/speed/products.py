"""Multiplications and additions of the products of tiles that a launch of ours makes.

Tiles count as they are multiplied: padded, and with the pairs that a mask then takes out. The three products of halves
that float32 factors take count as one.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import triton

from megakernel.ops.kernels.features import ELEMENTWISE
from megakernel.ops.kernels.launch import Launch


class _Tiles:
    """Products by what they are for; sizes as kernels name them."""

    def __init__(self, launch: Launch):
        self.options = launch.options
        named = dict(zip(launch.kernel.arg_names, launch.arguments))
        self.programs = prod(launch.grid)
        self.length: int = named["length"]
        # A matrix is a sum of two terms beside tokens of 16 bits (`features.split_matrix`), and so is E.
        self.terms = 1 if launch.arguments[0].element_size() == 4 else 2
        self.chunk, self.halves = self["C"] or 0, 2 if self["TWO"] else 1

    def __getitem__(self, name: str) -> Any:
        return self.options.get(name)

    @property
    def features(self) -> int:
        return self["MP"] * self.halves

    @property
    def matrix(self) -> int:
        """A token, or its gradient, times one term of the projection."""
        return 0 if self["MAP"] in ELEMENTWISE else 2 * self["DP"] * self["MP"]

    @property
    def map(self) -> int:
        """phi of a token."""
        return self.terms * self.matrix

    @property
    def state(self) -> int:
        """A token added to a program's columns of a state, or multiplied with them."""
        return 2 * self.features * self["BV"]

    @property
    def weights(self) -> int:
        """A token's products with the features of a tile of them, or what these hand back to it."""
        return 2 * self.chunk * self.features

    @property
    def weighed(self) -> int:
        """A tile's weights of values added up for a token, or a token's products with a tile of values."""
        return 2 * self.chunk * self["BV"]

    @property
    def pair(self) -> int:
        """A query and a key of a window compared, or its gradient for one of them."""
        # Under a softmax halves of tokens, each as wide as a rotation's.
        return 4 * self["DH"] if self["SOFTMAX"] else 2 * self.features

    @property
    def near_map(self) -> int:
        """phi of a token of a window that compares features."""
        return 0 if self["SOFTMAX"] else self.map

    def chunks(self) -> int:
        """Of FLuRKA's rows, in all programs of a launch that goes through segments."""
        return self.programs // self.segments() * triton.cdiv(self.length, self["B"])

    def segments(self) -> int:
        """Of a row."""
        return triton.cdiv(triton.cdiv(self.length, self["B"]), self["CHUNKS"])

    def starts(self) -> list[int]:
        """Where the tiles of queries of a row begin, which do not cross its chunks."""
        within = range(0, self["B"], self.chunk)
        places = (chunk + at for chunk in range(0, self.length, self["B"]) for at in within)
        return [place for place in places if place < self.length]

    def met(self, places: list[int]) -> int:
        """Keys that tiles of queries at these places meet one by one, tile by tile."""
        block, reach, step = self["B"], self["BLOCKS"] - 1, self["BK"]
        met = 0
        for at in places:
            window = max((at // block - reach) * block, 0)
            end = min(at + self.chunk, self.length)
            met += triton.cdiv(end - window, step) * step
        return met


def products(launch: Launch) -> int:
    """FLOPs of a launch of kernel attention or of FLuRKA, for whole rows that begin with their document."""
    kernel = launch.kernel.__name__
    tiles = _Tiles(launch)
    if "SEGMENT" not in launch.options:
        return FLURKA[kernel](tiles)
    of_token = KERNEL_ATTENTION[kernel](tiles)
    segments = triton.cdiv(tiles.length, tiles["SEGMENT"])
    tokens = triton.cdiv(tiles.length, tiles.chunk) * tiles.chunk
    return tiles.programs // segments * tokens * of_token


KERNEL_ATTENTION: dict[str, Callable[[_Tiles], int]] = {
    "write_keys": lambda of: of.map + of.state,
    "read": lambda of: 2 * of.map + 2 * of.state + of.weights + of.weighed,
    # What is left of do.o once it is exact takes the weights of the keys that it was off by.
    "pull_queries": lambda of: (
        2 * of.map + of.matrix + 2 * of.state + (2 if of["NORMALIZE"] else 1) * of.weights + of.weighed
    ),
    "write_queries": lambda of: of.map + of.state,
    "pull_values": lambda of: 2 * of.map + 2 * of.state + of.weights + of.weighed,
    # Maps without a bound are made once for their log scales and once for their gradient.
    "pull_keys": lambda of: (
        (3 if of["UNBOUNDED"] else 2) * of.map + of.matrix + 2 * of.state + of.weights + of.weighed
    ),
}
"""Kernel -> FLOPs of one token in one program, of queries as many as keys and of one key at a position."""


def _pool(of: _Tiles) -> int:
    pooled = 2 * of["RP"] * of["BP"] * of.terms * (of["DP"] + of["BV"])
    return of.chunks() * (pooled + of["RP"] * (of.matrix + of.state))


def _read(of: _Tiles) -> int:
    places = of.starts()
    of_pairs = of.chunk * of.met(places) * (of.pair + 2 * of["BV"]) + of.met(places) * of.near_map
    of_queries = len(places) * of.chunk * (of.near_map + of.map + of.state)
    blocks = of.programs // of.segments()
    return blocks * (of_pairs + of_queries) + of.chunks() * of["RP"] * of.state


def _pull_window(of: _Tiles) -> int:
    places = [at * of.chunk for at in range(of.programs)]
    met = of.met(places)
    once = of.chunk * (of.pair + 2 * of["VP"])
    # The mean over a gated window is met again before its gradient.
    of_pairs = once * (2 if of["GATED"] else 1) + of.chunk * of.pair
    own = 0 if of["SOFTMAX"] else 2 * of.map + of.matrix
    return met * (of_pairs + of.near_map) + len(places) * of.chunk * own


def _pull_queries(of: _Tiles) -> int:
    of_queries = len(of.starts()) * of.chunk * (of.state + of.map + of.matrix)
    return of.programs // of.segments() * of_queries + of.chunks() * of["RP"] * of.state


def _write_queries(of: _Tiles) -> int:
    segment = of["CHUNKS"] * of["B"]
    tokens = sum(
        triton.cdiv(min(segment, of.length - at), of.chunk) * of.chunk for at in range(0, of.length, segment)
    )
    return of.programs // of.segments() * tokens * (of.map + of.state)


def _pull_landmarks(of: _Tiles) -> int:
    of_landmarks = of.chunks() * of["RP"] * (2 * of.matrix + 2 * of.state)
    of_queries = len(of.starts()) * of.chunk * (of.map + of.state)
    return of_landmarks + of.programs // of.segments() * of_queries


def _pull_keys(of: _Tiles) -> int:
    block, reach, step = of["B"], of["BLOCKS"], of["BK"]
    chunks = triton.cdiv(of.length, block)
    queries = handed = 0
    for at in range(0, of.programs * step, step):
        behind = min((at + step - 1 + block * reach) // block * block, of.length)
        queries += triton.cdiv(max(behind - at, 0), of.chunk) * of.chunk
        nearest = at + block * (reach - 1)
        handed += max(min((nearest + step + block - 2) // block + 1, chunks) - nearest // block, 0)
    of_pairs = step * queries * (2 * of.pair + 4 * of["VP"]) + queries * of.near_map
    of_landmarks = handed * 2 * step * of["RP"] * (2 * of["DH"] + of["VP"])
    own = 0 if of["SOFTMAX"] else 2 * of.map + of.matrix
    return of_pairs + of_landmarks + of.programs * step * own


def _pull_pools(of: _Tiles) -> int:
    return of.chunks() * 2 * of["RP"] * of["BP"] * (of["DP"] + of["VP"])


FLURKA: dict[str, Callable[[_Tiles], int]] = {
    "pool": _pool,
    "read": _read,
    "pull_window": _pull_window,
    "pull_queries": _pull_queries,
    "write_queries": _write_queries,
    "pull_landmarks": _pull_landmarks,
    "pull_keys": _pull_keys,
    "pull_pools": _pull_pools,
}
"""Kernel -> FLOPs of a launch for one row of one head."""
