"""Softmax attention to a window and to the few earlier blocks that its landmarks choose (docs/formulas.md, 11)."""

from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_cached, check_choice, check_heads, check_positions
from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import MISSING, Landmarks, complete_blocks
from megakernel.ops.mixture import Rotation
from megakernel.ops.ring import Ring
from megakernel.ops.selected_attention import chunked, reference
from megakernel.ops.selected_attention.grouped import completed_groups, no_group
from megakernel.ops.selected_attention.inputs import Score, SelectedInputs, SelectionRule, Unit
from megakernel.ops.selected_attention.masked import chosen_keys
from megakernel.ops.selected_attention.tiles import choose_for_tiles
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import Tail


class SelectedState(NamedTuple):
    """The state of a sequence; it grows by a key and a value per token, and by r landmarks per block."""

    cache: Tail
    """The earlier tokens of the sequence, the latest last, and arbitrary ones before its start; keys unrotated."""

    landmarks: Landmarks | None
    """Those of every complete block, without values; `ends` are relative to the next token. None: no block yet."""

    groups: Landmarks | None
    """The same of every complete group, or one place without any; None: before the first token, or one level."""

    choice: Tensor
    """(B, H_kv, k) int64: ends, relative to the next token, of the blocks that the last token's tile has chosen, or
    MISSING; (B, H_kv, 0) for unit `token`."""


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pool: Tensor,
    selected: int,
    blocks: int = 1,
    unit: Unit = "token",
    score: Score = "max",
    group: int | None = None,
    rotary: Rotation | None = None,
    rotates_chosen: bool = True,
    positions: Positions = 0,
    initial_state: SelectedState | None = None,
    return_state: bool = True,
    ring: Ring | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, SelectedState | None]:
    """Causal softmax over a token's window and over `selected` earlier blocks of its document, read exactly.

    Every complete block has r landmarks, sums of its keys. A query scores the blocks before its window by its products
    with their landmarks and reads those with the largest scores; the choice has no gradient. Equal scores go to the
    earlier block.

    Args:
        q: (B, H, N, d), not rotated.
        k: (B, H_kv, N, d), not rotated, H a multiple of H_kv. The H / H_kv query heads of a key head choose together:
            a block's score is the largest of theirs.
        v: (B, H_kv, N, D).
        pool: E (r, b) or (H_kv, r, b), which makes r landmarks of the b tokens of a block; blocks restart at every
            document.
        selected: blocks that are chosen, k >= 1.
        blocks: the window: 1: a token's current block; 2: also the block before.
        unit: who chooses. `token`: every token for itself; `tile`: the first token of a block, for all tokens of it.
        score: a block's score: the `max`imum, or the log-sum-exp (`lse`), of q.l / sqrt(d) over its landmarks.
        group: the choice has two levels: the k best groups of `group` blocks by their landmarks, means of those of the
            blocks, then the k best blocks in them. Blocks after the last complete group are always scored. None: the
            k best of all blocks.
        rotary: rotates queries and keys by their positions after the choice; None: they are not rotated.
        rotates_chosen: False: products with keys of chosen blocks are of unrotated vectors, times the factor of the
            rotary scaling where it has one (YaRN): the window is under the same softmax.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document.
        initial_state: returned by the call for the tokens before these.
        return_state: False: return None for the state.
        ring: q, k and v are a shard's, one of equal ones that pass on their keys and values. `initial_state` then has
            the landmarks and groups of all earlier shards, and in its cache the tokens of the window. No state is
            returned: `return_state` has to be False. All shards run the same backward.
        out_dtype: of the output; None: that of v.
        backend: reference, chunked or triton; None reads MEGAKERNEL_BACKEND from the environment, and by default takes
            triton on a GPU and chunked elsewhere.

    Returns:
        (B, H, N, D) and the state after the last token.

    Raises:
        ValueError: invalid shapes, dtypes, devices or numbers; the message names the argument.
    """
    check_heads(q, k, v)
    check_positions(positions, q)
    check_choice("blocks", blocks, (1, 2))
    check_choice("unit", unit, ("tile", "token"))
    check_choice("score", score, ("max", "lse"))
    if pool.dim() not in (2, 3) or pool.shape[:-2] not in ((), k.shape[1:2]) or 0 in pool.shape:
        raise ValueError(
            f"pool has shape {tuple(pool.shape)}; expected (rank, block) or ({k.shape[1]}, rank, block)"
        )
    if selected < 1:
        raise ValueError(f"selected={selected}; expected at least 1")
    if group is not None and group < 2:
        raise ValueError(f"group={group}; expected None or at least 2")
    if ring is not None and return_state:
        raise ValueError("return_state=True: a shard in a ring has no state; expected False")
    selection = SelectionRule(pool.shape[-1], blocks, selected, unit, score, group or 0)
    state = empty_state(k, v, selection) if initial_state is None else initial_state
    check_cached("initial_state.cache", state.cache, k, v)
    inputs, own, ended = _inputs_after(state, q, k, v, pool, selection, rotary, rotates_chosen, positions)
    out, choice = choose(IMPLEMENTATIONS, backend)(q, k, v, inputs._replace(ring=ring))
    out = out.to(out_dtype or v.dtype)
    if not return_state:
        return out, None
    carried = inputs.landmarks.carried(own, positions, q.shape[2], selection.block_size)
    groups = inputs.groups
    if groups is not None:
        groups = groups.carried(ended, positions, q.shape[2], selection.span)
    elif selection.group:
        groups = no_group(carried, selection)
    whole = Tail(*(torch.cat(both, 2) for both in zip(state.cache, (k, v))))
    return out, SelectedState(whole, carried, groups, choice)


def _inputs_after(
    state: SelectedState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    selection: SelectionRule,
    rotary: Rotation | None,
    rotates_chosen: bool,
    positions: Positions,
) -> tuple[SelectedInputs, int, int]:
    """What a backend takes, and the last places of its landmarks and groups, which are of these tokens."""
    missing = max(0, selection.reach - state.cache.keys.shape[2])
    cache = Tail(*(F.pad(x, (0, 0, missing, 0)) for x in state.cache)) if missing else state.cache
    own = block_landmarks(k, cache, pool, positions)
    landmarks = own.appended_to(state.landmarks)
    ended = completed_groups(landmarks, positions, q.shape[2], selection) if selection.group else None
    groups = state.groups if ended is None else ended.appended_to(state.groups)
    if isinstance(positions, int) and positions + q.shape[2] < selection.span:
        groups = None  # the document has none yet
    inputs = SelectedInputs(
        selection, cache, landmarks, groups, state.choice, rotary, rotates_chosen, positions
    )
    return inputs, own.ends.shape[1], ended.ends.shape[1] if ended else 0


@torch.no_grad()
def chosen_tokens(
    q: Tensor, k: Tensor, pool: Tensor, selection: SelectionRule, positions: Positions
) -> Tensor:
    """(B, H_kv, N, N) bool: which keys are in the blocks that a query of whole sequences chooses."""
    state = empty_state(k, k, selection)
    inputs, _, _ = _inputs_after(state, q, k, k, pool, selection, None, False, positions)
    tiles = choose_for_tiles(q, inputs)
    return chosen_keys(tiles, slice(0, q.shape[2]), tiles.total)[..., tiles.cached :]


def empty_state(k: Tensor, v: Tensor, selection: SelectionRule) -> SelectedState:
    """The state before the first token."""
    count = selection.chosen if selection.unit == "tile" else 0
    choice = torch.full((*k.shape[:2], count), MISSING, device=k.device)
    return SelectedState(Tail(k[:, :, :0], v[:, :, :0]), None, None, choice)


@torch.no_grad()
def block_landmarks(k: Tensor, cache: Tail, pool: Tensor, positions: Positions) -> Landmarks:
    """Landmarks (B, H_kv, S, r, d), in float32 or better and without values, of the blocks that end among k."""
    size, dtype = pool.shape[-1], accum_dtype(k.dtype)
    blocks = complete_blocks(positions, k.shape[2], k.device, size)
    weights = pool.to(dtype) if pool.dim() == 2 else pool.to(dtype)[:, None]
    keys = weights @ blocks.gather(cache.keys[:, :, -size:], k).to(dtype)
    return Landmarks(keys, keys[..., :0], blocks.ends)


def _kernels() -> ModuleType:
    from megakernel.ops.selected_attention import triton

    return triton


IMPLEMENTATIONS: dict[str, Implementation] = {
    "triton": Kernels("chosen blocks", _kernels),
    "chunked": chunked.attend,
    "reference": reference.attend,
}
"""Backend -> implementation."""
