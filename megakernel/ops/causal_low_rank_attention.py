"""Kernel attention to the landmarks of earlier blocks alone: causal FLuRKA without a window (docs/formulas.md, 4)."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_entering, check_feature_map, check_heads, check_positions
from megakernel.ops.block_pooling import BlockEnds, block_ends, chunk_count
from megakernel.ops.chunks import chunk_keys
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import (
    Positions,
    began_before,
    carry_factor,
    open_documents,
    sees_far,
    token_positions,
)
from megakernel.ops.feature_maps import Features, LayerMap, Map, check_state, start_state
from megakernel.ops.groups import SHORT, scan_groups
from megakernel.ops.kernel_attention.reference import per_query_head, scaled_phi
from megakernel.ops.mixture import by_component, first_key, pack_keys
from megakernel.ops.partial_output import (
    Finish,
    FinishedOutput,
    PartialOutput,
    add,
    finish_for,
    normalized,
    recompute_lost,
    with_ones,
)
from megakernel.ops.projections import Projection
from megakernel.ops.scan import Links, link, read_states, scan_chunks, write_chunks
from megakernel.ops.state import EMPTY, Exchange, KernelState, Once, keep, merge
from megakernel.ops.tensors import Tensors, accum_dtype

RUN = 256
"""Tokens per chunk of the scan: several blocks, so that their landmarks fill a matrix product."""

GROUP = 2048
"""Tokens whose features and states are in memory at once, rounded down to a multiple of RUN."""


class CausalLowRankOptions(NamedTuple):
    """Validated arguments of a backend other than queries, keys and values."""

    feature_map: Map | str
    projection: Projection | None
    block_size: int
    priors: Tensor | None
    positions: Positions
    initial_state: KernelState | None
    exchange: Exchange | None


def causal_low_rank_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Map | str,
    block_size: int,
    projection: Projection | None = None,
    priors: Tensor | None = None,
    positions: Positions = 0,
    initial_state: KernelState | None = None,
    return_state: bool = True,
    exchange: Exchange | None = None,
    backend: str | None = None,
) -> tuple[Tensor, KernelState | None]:
    """phi(q) to the landmarks of all complete blocks before the query's, linear in sequence length.

    o_i = phi(q_i) S_J / (phi(q_i) z_J), with S_J and z_J of eq. 4.1 of docs/formulas.md and J the block of token i. The
    landmark token count is the same for all landmarks, and cancels. In the first block of a document, o_i = 0.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, C r, d), the landmarks' keys as `pool_blocks` orders them: r in each of C = ceil(N / b) chunks, of
            the block that ends there; (B, H_kv, M, C r, d) with priors.
        v: (B, H_kv, C r, D), their values.
        feature_map: phi; see `kernel_attention`.
        block_size: b, tokens of a block.
        projection: of the feature map; see `kernel_attention`.
        priors: pi (H_kv, M) >= 0 of mixture keys: sum_r pi_r phi(k_r) replaces phi(k).
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one.
        initial_state: the state that sequences continue from; they can be split at any token.
        return_state: also return the state after the last token; otherwise None.
        exchange: for sequences sharded over ranks, instead of `initial_state`: takes the state that these landmarks add
            and returns the entering one. The returned state is then what these landmarks add.
        backend: reference or chunked; None reads MEGAKERNEL_BACKEND from the environment.

    Returns:
        (B, H, N, D) in the dtype of v, and the state after the last token or None.

    Raises:
        ValueError: invalid shapes, dtypes, devices or names; the message names the argument.
    """
    key = first_key(k, priors)
    _check_landmarks(q, key, v, block_size)
    k = pack_keys(k)
    check_feature_map(feature_map, projection, key)
    check_positions(positions, q)
    if initial_state is not None:
        check_state(initial_state, feature_map, key, projection, v.shape[-1])
    check_entering(initial_state, exchange)
    options = CausalLowRankOptions(
        feature_map, projection, block_size, priors, positions, initial_state, exchange
    )
    out, state = choose(IMPLEMENTATIONS, backend)(q, k, v, options)
    return out, state if return_state else None


def _check_landmarks(q: Tensor, k: Tensor, v: Tensor, block_size: int) -> None:
    check_heads(q, k, v, cross=True)
    chunks = chunk_count(q.shape[2], block_size)
    if k.shape[2] == 0 or k.shape[2] % chunks:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; expected equally many landmarks for each of {chunks} chunks of "
            f"block_size={block_size} tokens"
        )


class _Layout(NamedTuple):
    """How tokens are divided."""

    size: int
    """L, tokens per chunk."""

    runs: int
    """Chunks of tokens per chunk of the scan."""

    kv_heads: int


def chunked(q: Tensor, k: Tensor, v: Tensor, options: CausalLowRankOptions) -> tuple[Tensor, KernelState]:
    """Attention (B, H, N, D) and the state after the last token, by a scan over chunks of landmarks.

    With an exchange, the entering state comes from it, and the returned one is what these landmarks alone add.
    """
    positions, block_size, length = options.positions, options.block_size, q.shape[2]
    ends = block_ends(positions, length, block_size, q.device)
    size, chunks = ends.size, ends.place.shape[1]
    runs = min(max(1, RUN // size), chunks)
    missing = -chunks % runs
    state = options.initial_state
    if state is None:
        state = start_state(options.feature_map, k[..., : q.shape[-1]], options.projection, v.shape[-1])
    pending = None if options.exchange is None else Once(options.exchange)
    run = partial(_over_groups, options=options, layout=_Layout(size, runs, k.shape[1]))
    tables = _tables(ends, missing)
    finish = finish_for(options.feature_map, True)

    def in_chunks(mask: Tensor) -> Tensor:
        """(B, N) -> (B, 1, C, L)."""
        return chunk_keys(mask[:, None, :, None], size, chunks + missing)[..., 0]

    far = in_chunks(sees_far(token_positions(positions, length, q.device), block_size, 1))

    def compute(q: Tensor, k: Tensor, v: Tensor) -> FinishedOutput:
        queries = chunk_keys(q, size, chunks + missing)
        keys, values = (
            F.pad(x.unflatten(2, (chunks, -1)), (0, 0, 0, 0, 0, missing))
            if missing
            else x.unflatten(2, (chunks, -1))
            for x in (k, v)
        )
        if pending is None:
            (out, *lost), leaving = run(partial(_attend, finish), (queries, keys, values, *tables), state)
        else:
            _, leaving = run(_write, (keys, values, *tables), state)
            entering = pending(leaving, carry_factor(positions, q))
            sums, _ = run(_sums, (queries, keys, values, *tables), state)
            reads = in_chunks(began_before(positions, length, q.device))
            (out, *lost), _ = run(partial(_read, finish), (queries, reads, *sums), entering.wait())
        # Queries of a document's first block see nothing, and have lost nothing.
        lost = [(mask & far).flatten(2)[:, :, :length] for mask in lost]
        return (out.flatten(2, 3)[:, :, :length].to(v.dtype), *lost), leaving

    finished, leaving = compute(q, k, v)
    return recompute_lost(finished, lambda: compute(q.double(), k.double(), v.double())[0][0]), leaving


def _tables(ends: BlockEnds, missing: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions (B, 1, C, L) of tokens, and places (B, 1, C) of blocks' ends and whether they exist; padded chunks."""
    positions, place, exists = ends
    if missing:
        size = positions.shape[2]
        more = positions[:, -1:, -1:] + torch.arange(1, missing * size + 1, device=positions.device)
        positions = torch.cat([positions, more.view(len(positions), missing, size)], 1)
        place, exists = (F.pad(x, (0, missing)) for x in (place, exists))
    return positions[:, None], place[:, None], exists[:, None]


def _over_groups(
    step, inputs: Tensors, state: KernelState, *, options: CausalLowRankOptions, layout: _Layout
):
    """Scan `step(inputs, state, phi, layout) -> outputs, state` over groups; dimension 2 of tensors is chunks."""
    dtype = torch.promote_types(accum_dtype(inputs[0].dtype), state.sums.dtype)
    state = KernelState(*(x.to(dtype) for x in state))

    def on_group(_: Positions, carry: Tensors, sequences: Tensors, shared: Tensors):
        entering = KernelState(carry[0], carry[1].detach())
        outputs, leaving = step(sequences, entering, LayerMap(options.feature_map, *shared), layout)
        return outputs, tuple(leaving)

    outputs, leaving = scan_groups(
        on_group,
        tuple(state),
        inputs,
        (options.projection, options.priors),
        group=layout.runs * max(1, GROUP // (layout.runs * layout.size)),
        short=max(1, SHORT // layout.size),
    )
    return outputs, KernelState(leaving[0], leaving[1].detach())


def _attend(finish: Finish, inputs: Tensors, state: KernelState, phi: LayerMap, layout: _Layout):
    sums, state = _scan(inputs, state, phi, layout)
    return finish(sums), state


def _sums(inputs: Tensors, state: KernelState, phi: LayerMap, layout: _Layout):
    sums, state = _scan(inputs, state, phi, layout)
    return (sums.values, sums.scale_or_zero), state


def _write(inputs: Tensors, state: KernelState, phi: LayerMap, layout: _Layout):
    keys, values, links = _landmarks(inputs, state.sums.dtype, phi, layout)
    return (), write_chunks(keys, values, state, links)


def _read(finish: Finish, inputs: Tensors, state: KernelState, phi: LayerMap, layout: _Layout):
    """Outputs from the local sums and, for queries in `reads` (B, 1, C, L), from the entering state."""
    q, reads, values, scale = inputs
    queries = phi.of_queries(_rows(q.to(state.sums.dtype), layout))
    entering = KernelState(state.sums[:, :, None], state.log_scale[:, :, None])
    read = read_states(queries, entering, reads[:, 0, :, None])
    total = add(_unrolled(read, layout, q.shape[1], 1), PartialOutput(values, scale))
    return finish(total), state


def _scan(
    inputs: Tensors, state: KernelState, phi: LayerMap, layout: _Layout
) -> tuple[PartialOutput, KernelState]:
    """Sums (B, H, C, L, D + 1) over the landmarks that each query sees, and the state after the group."""
    q, *tensors = inputs
    phi_q = phi.of_queries(_merged(_rows(q.to(state.sums.dtype), layout), layout.runs))
    keys, values, links = _landmarks(tuple(tensors), state.sums.dtype, phi, layout)
    sums, state = scan_chunks(phi_q, keys, values, state, links)
    return _unrolled(sums, layout, q.shape[1], layout.runs), state


def _landmarks(
    inputs: Tensors, dtype: torch.dtype, phi: LayerMap, layout: _Layout
) -> tuple[Features, Tensor, Links]:
    """Features and weighted values of the landmarks of each chunk of the scan, and links to their queries."""
    keys, values, positions, place, exists = inputs
    size, runs, _ = layout
    weighted = with_ones(values.to(dtype), exists[..., None, None].to(dtype))
    at = positions[:, 0].unflatten(1, (-1, runs))
    index = torch.arange(runs * size, device=at.device).view(runs, size)
    ends = place[:, 0].unflatten(1, (-1, runs)) + index[:, 0]
    links = link(index - at, ends.repeat_interleave(keys.shape[3], 2), delay=1)
    return phi.of_keys(_merged(keys.to(dtype), runs)), _merged(weighted, runs), links


def _rows(q: Tensor, layout: _Layout) -> Tensor:
    """(B, H, C, L, d) -> (B, H_kv, C, G L, d), for G query heads per key head."""
    return q.unflatten(1, (layout.kv_heads, -1)).transpose(2, 3).flatten(3, 4)


def _merged(x: Tensor, runs: int) -> Tensor:
    """(B, H, C, R, d) -> (B, H, C / runs, runs R, d)."""
    return x.unflatten(2, (-1, runs)).flatten(3, 4)


def _unrolled(sums: PartialOutput, layout: _Layout, heads: int, runs: int) -> PartialOutput:
    """Rows (B, H_kv, C / runs, runs G L, ...) as (B, H, C, L, ...)."""

    def of(x: Tensor) -> Tensor:
        rows = x.unflatten(3, (runs, -1)).flatten(2, 3)
        return rows.unflatten(3, (heads // layout.kv_heads, -1)).transpose(2, 3).flatten(1, 2)

    return PartialOutput._make(None if x is None else of(x) for x in sums)


def reference(q: Tensor, k: Tensor, v: Tensor, options: CausalLowRankOptions) -> tuple[Tensor, KernelState]:
    """Quadratic in float64, straight from the formula; same arguments and results as `chunked`."""
    positions, block_size, state = options.positions, options.block_size, options.initial_state
    batch, heads, length, width = q.shape
    group = heads // k.shape[1]
    at = token_positions(positions, length, q.device).expand(batch, -1)
    index = torch.arange(length, device=q.device)
    first = index - at
    chunks = chunk_count(length, block_size)
    rank = k.shape[2] // chunks
    # The place of the block's end in each chunk, length if there is none.
    ends = [[length] * chunks for _ in range(batch)]
    for row, places in enumerate(at.tolist()):
        for place, position in enumerate(places):
            if position >= 0 and position % block_size == block_size - 1:
                ends[row][place // min(block_size, length)] = place
    end = torch.tensor(ends, device=q.device).repeat_interleave(rank, 1)
    # A landmark is seen by the later tokens of its document.
    pairs = (end[:, None] < index[:, None]) & (end[:, None] >= first[..., None])

    phi_q, logs_q = scaled_phi(options.feature_map, q.double(), per_query_head(options.projection, group))
    components, shares = by_component(k.double(), options.priors, width)
    phi_components, logs = map(
        torch.stack,
        zip(*(scaled_phi(options.feature_map, key, options.projection) for key in components), strict=True),
    )
    logs_k = logs.amax(0)
    phi_k = (shares[:, None] * phi_components * torch.exp(logs - logs_k)[..., None]).sum(0)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1).double()

    def state_of(selected: Tensor) -> KernelState:
        """The state of the landmarks selected by a mask (B, L)."""
        logs = torch.where(selected[:, None], logs_k, EMPTY)
        scale = logs.amax(-1)
        weights = torch.where(selected[:, None], torch.exp(logs - scale[..., None]), 0.0)
        return KernelState((phi_k * weights[..., None]).transpose(-1, -2) @ values, scale)

    last = (end < length) & (end >= first[:, -1:])
    leaving = state_of(last)
    carries = open_documents(positions, length, batch, q.device)
    if options.exchange is not None:
        state = options.exchange(leaving, carries).wait()
    reads = (first < 0)[:, None]
    pair_logs = torch.where(pairs[:, None], logs_k.repeat_interleave(group, 1)[:, :, None], EMPTY)
    scale = pair_logs.amax(-1)
    if state is not None:
        state_logs = torch.where(reads, state.log_scale.repeat_interleave(group, 1)[..., None], EMPTY)
        scale = torch.maximum(scale, state_logs)
    weights = phi_q @ phi_k.repeat_interleave(group, 1).transpose(-1, -2)
    weights = (weights * torch.exp(pair_logs - scale[..., None])).masked_fill(~pairs[:, None], 0.0)
    total = weights @ values.repeat_interleave(group, 1)
    if state is not None:
        read = (
            phi_q @ state.sums.double().repeat_interleave(group, 1) * torch.exp(state_logs - scale)[..., None]
        )
        total = total + read * reads[..., None]
    out = normalized(PartialOutput(total, logs_q + scale)).to(v.dtype)
    if options.exchange is None and state is not None:
        leaving = merge(leaving, keep(state, carries))
    return out, leaving


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
