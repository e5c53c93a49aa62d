"""Who reads what: pairs of a query and a listed item, sorted by item, so that products of whole items are dense."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.dispatch import runs_on_gpu
from megakernel.ops.selected_attention.inputs import NONE

GROUP = 64
"""At most this many queries of an item are multiplied with it at once."""

NUMBERS_ON_CPU, NUMBERS_ON_GPU = 2**21, 2**26
"""Numbers that one step gathers and computes: what a CPU's caches hold, and enough that a GPU has few launches."""


class Readers(NamedTuple):
    """J groups of up to R queries that read the same item, in the order of the items and then of the queries.

    Their number does not depend on who reads what, so that nothing waits for the GPU: the last groups may be empty.
    """

    items: Tensor
    """(J,) int64: the item, among those of all sequences; any for an empty group."""

    queries: Tensor
    """(J, R) int64: the queries, among those of all sequences; any where there is none."""

    pairs: Tensor
    """(J, R) int64: their places in the flattened lists, or the number of all places where there is none."""

    exists: Tensor
    """(J, R) bool"""

    ends: Tensor
    """(X items,) int64: number of groups of this item, among those of all sequences, and of the items before it."""

    def some(self, groups: slice) -> "Readers":
        """The readers of these groups."""
        return self._replace(**{name: getattr(self, name)[groups] for name in self._fields[:-1]})


def numbers_at_once(x: Tensor) -> int:
    """Numbers that one step gathers and computes where `x` is."""
    return NUMBERS_ON_GPU if runs_on_gpu(x) else NUMBERS_ON_CPU


def readers_of(lists: Tensor, items: int, size: int | None = None) -> Readers:
    """The readers of the `items` >= 1 items of each of X sequences; lists (X, n, k >= 1) of n queries, or NONE.

    size: R; None: up to GROUP, fewer for items with few readers.
    """
    sequences, _, listed = lists.shape
    pairs, total, device = lists.numel(), sequences * items, lists.device
    first_items = torch.arange(0, total, items, device=device)[:, None, None]
    item, order = torch.where(lists == NONE, total, lists + first_items).flatten().sort(stable=True)
    ends = torch.searchsorted(item, torch.arange(1, total + 1, device=device))
    starts = torch.cat([torch.searchsorted(item, item.new_zeros(1)), ends[:-1]])
    # Every item may have one group that is not full: at most a quarter as many as the full ones.
    size = size or min(GROUP, max(1, pairs // (4 * total)))
    groups = -((starts - ends) // size)
    last_groups = groups.cumsum(0)
    group = torch.arange(min(pairs, -(-pairs // size) + total), device=device)
    owner = torch.searchsorted(last_groups, group, right=True)
    owned = owner < total
    owner = owner.clamp(max=total - 1)
    within = group - (last_groups - groups)[owner]
    places = (starts[owner] + within * size)[:, None] + torch.arange(size, device=device)
    exists = (places < ends[owner, None]) & owned[:, None]
    found = order[places.clamp(max=pairs - 1)]
    return Readers(owner, found // listed, torch.where(exists, found, pairs), exists, last_groups)
