"""Linear-time kernel attention on any device: tokens in groups of chunks, with recurrent states between chunks."""

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

from megakernel.ops.chunks import (
    as_queries,
    chunk_keys,
    chunk_queries,
    token_queries,
    unchunk_queries,
    unchunk_token,
)
from megakernel.ops.documents import Positions, began_before, carry_factor, open_documents, reversed_positions
from megakernel.ops.feature_maps import Features, LayerMap, start_state
from megakernel.ops.groups import scan_groups
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.partial_output import (
    Finish,
    FinishedOutput,
    PartialOutput,
    add,
    finish_for,
    recompute_lost,
    with_ones,
)
from megakernel.ops.scan import Links, chunk_links, existing, read_states, scan_chunks, write_chunks
from megakernel.ops.state import Exchange, KernelState, Once, empty_state, keep, merge
from megakernel.ops.tensors import Tensors, accum_dtype

CHUNK = 64
"""Tokens per chunk; weights of pairs within a chunk are computed explicitly."""

GROUP = 2048
"""Tokens whose features and chunk states are in memory at once, a multiple of CHUNK."""

Exchanges = tuple[Exchange, ...]
"""The exchange with earlier shards, and without `causal` that with later ones; empty without shards."""


def attend(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, KernelState]:
    """Attention (B, H, N, D) and the state after the last token.

    With an exchange, the entering state comes from it, and the returned state is what these tokens alone add.
    """
    feature_map, projection = options.feature_map, options.projection
    positions, key_weights = options.positions, options.key_weights
    phi = LayerMap(feature_map, projection, options.priors)
    state = options.initial_state
    if state is None:
        state = start_state(feature_map, k[..., : q.shape[-1]], projection, v.shape[-1])
    exchanges = tuple(Once(x) for x in (options.exchange, options.exchange_after) if x is not None)
    variant: Callable[..., FinishedOutput] = _bidirectional_documents
    if options.causal:
        variant = _causal
    elif isinstance(positions, int):
        variant = _bidirectional

    def compute(q: Tensor, k: Tensor, v: Tensor) -> FinishedOutput:
        run = partial(_over_groups, phi=phi, positions=positions)
        finish = finish_for(feature_map, options.normalize)
        (out, *lost), leaving = variant(run, finish, (q, k, v, key_weights), state, exchanges, positions)
        if key_weights is not None and not options.cross:
            # A token with key weight 0 is padding; if its query is lost, the output stays 0.
            real = (key_weights != 0).repeat_interleave(q.shape[1] // k.shape[1], 1)
            lost = [mask & real for mask in lost]
        return (out, *lost), leaving

    finished, leaving = compute(q, k, v)
    return recompute_lost(finished, lambda: compute(q.double(), k.double(), v.double())[0][0]), leaving


def _causal(
    run, finish: Finish, inputs: Tensors, state: KernelState, exchanges: Exchanges, positions: Positions
) -> FinishedOutput:
    """Causal attention; the exchange of a shard's states overlaps with its local sums."""
    q, *keys = inputs
    if not exchanges:
        return run(partial(_token if q.shape[2] == 1 else _attend, finish), inputs, state)
    _, added = run(_write, tuple(keys), state)
    pending = exchanges[0](added, carry_factor(positions, q))
    local, _ = run(_sums, inputs, state)
    reads = began_before(positions, q.shape[2], q.device)[:, None]
    out, _ = run(partial(_read, finish, keys[1].dtype), (q, reads, *local), pending.wait())
    return out, added


def _bidirectional(
    run, finish: Finish, inputs: Tensors, state: KernelState, exchanges: Exchanges, positions: int
) -> FinishedOutput:
    """Bidirectional attention of one document per sequence, including keys of the shards before and after."""
    q, *keys = inputs
    _, added = run(_write, tuple(keys), state)
    carries = carry_factor(positions, q)
    pendings = [exchange(added, carries) for exchange in exchanges]
    all_keys = reduce(merge, (pending.wait() for pending in pendings), added)
    out, _ = run(partial(_read, finish, keys[1].dtype), (q, None), all_keys)
    return out, added


def _bidirectional_documents(
    run, finish: Finish, inputs: Tensors, state: KernelState, exchanges: Exchanges, positions: Tensor
) -> FinishedOutput:
    """Bidirectional attention within packed documents: a causal scan plus a strictly causal scan in reverse order."""
    run_reversed = partial(run, positions=reversed_positions(positions, continued=bool(exchanges)))
    reversed_inputs = tuple(None if x is None else x.flip(2) for x in inputs)
    before, after = state, empty_state(state)
    if exchanges:
        _, last = run(_write, inputs[1:], before)
        _, first = run_reversed(_write, reversed_inputs[1:], after)
        # A document that starts at the shard's first token has no part in earlier shards.
        added = last, keep(first, positions[:, 0] > 0)
        carries = open_documents(positions, positions.shape[1], len(positions), positions.device)
        pendings = [exchange(x, carries) for exchange, x in zip(exchanges, added)]
        before, after = (pending.wait() for pending in pendings)
    earlier, leaving = run(_sums, inputs, before)
    later, _ = run_reversed(partial(_sums, delay=1), reversed_inputs, after)
    out, *lost = finish(add(PartialOutput(*earlier), PartialOutput(*(x.flip(2) for x in later))))
    return (out.to(inputs[2].dtype), *lost), last if exchanges else leaving


def _over_groups(step, inputs: Tensors, state: KernelState, *, phi: LayerMap, positions: Positions):
    """Scan `step(inputs, state, positions, phi) -> outputs, state` over groups of tokens."""
    dtype = torch.promote_types(accum_dtype(inputs[0].dtype), state.sums.dtype)
    state = KernelState(*(x.to(dtype) for x in state))

    def on_group(positions: Positions, carry: Tensors, sequences: Tensors, shared: Tensors):
        entering = KernelState(carry[0], carry[1].detach())
        outputs, leaving = step(sequences, entering, positions, LayerMap(phi.feature_map, *shared))
        return outputs, tuple(leaving)

    outputs, leaving = scan_groups(on_group, tuple(state), inputs, phi[1:], group=GROUP, positions=positions)
    return outputs, KernelState(leaving[0], leaving[1].detach())


def _attend(finish: Finish, inputs: Tensors, state: KernelState, positions: Positions, phi: LayerMap):
    q, v = inputs[0], inputs[2]
    sums, state = _scan(inputs, state, positions, phi)
    return as_queries(finish(sums), q, v.dtype), state


def _token(finish: Finish, inputs: Tensors, state: KernelState, positions: Positions, phi: LayerMap):
    """`_attend` for one token: add it to the state, then read the state."""
    q, k, v, key_weights = inputs
    dtype = state.sums.dtype
    if not isinstance(positions, int):
        state = keep(state, positions[:, 0] > 0)
    elif positions == 0:
        state = empty_state(state)
    values = with_ones(v.to(dtype), None if key_weights is None else key_weights[..., None])
    keys = phi.of_keys(k.to(dtype)[:, :, None])
    added = keys.values[:, :, 0].transpose(-1, -2) * values
    if keys.log_scale is None:
        state = KernelState(state.sums + added, torch.zeros_like(state.log_scale))
    else:
        # A key of weight 0 must not set the scale.
        state = merge(state, KernelState(added, existing(keys, values[:, :, None])[:, :, 0, 0]))
    queries = phi.of_queries(token_queries(q.to(dtype), k.shape[1]))
    out, *lost = map(
        unchunk_token, finish(read_states(queries, KernelState(*(x[:, :, None] for x in state)), None))
    )
    return (out.to(v.dtype), *lost), state


def _sums(inputs: Tensors, state: KernelState, positions: Positions, phi: LayerMap, delay: int = 0):
    q = inputs[0]
    sums, state = _scan(inputs, state, positions, phi, delay)
    return tuple(unchunk_queries(x, q.shape[1], q.shape[2]) for x in (sums.values, sums.scale_or_zero)), state


def _write(inputs: Tensors, state: KernelState, positions: Positions, phi: LayerMap):
    k, v, key_weights = inputs
    links = chunk_links(positions, k.shape[2], k.device, CHUNK)
    return (), write_chunks(*_keys(k, v, key_weights, links, phi, state.sums.dtype), state, links)


def _read(
    finish: Finish,
    dtype: torch.dtype,
    inputs: Tensors,
    state: KernelState,
    positions: Positions,
    phi: LayerMap,
):
    """Outputs from the entering state, for the queries in `reads` (None: all), plus their local sums if given."""
    q, reads, *sums = inputs
    length, kv_heads = q.shape[2], state.sums.shape[1]
    queries = phi.of_queries(chunk_queries(q.to(state.sums.dtype), kv_heads, length))
    entering = KernelState(state.sums[:, :, None], state.log_scale[:, :, None])
    total = read_states(queries, entering, None if reads is None else reads[:, :, None])
    if sums:
        logs = chunk_queries(sums[1][..., None], kv_heads, length)[..., 0]
        total = add(total, PartialOutput(chunk_queries(sums[0], kv_heads, length), logs))
    return as_queries(finish(total), q, dtype), state


def _scan(inputs: Tensors, state: KernelState, positions: Positions, phi: LayerMap, delay: int = 0):
    q, k, v, key_weights = inputs
    links = chunk_links(positions, q.shape[2], q.device, CHUNK, delay)
    chunks, size = links.writes.shape[1:]
    queries = phi.of_queries(chunk_queries(q.to(state.sums.dtype), k.shape[1], size, chunks))
    return scan_chunks(queries, *_keys(k, v, key_weights, links, phi, state.sums.dtype), state, links)


def _keys(
    k: Tensor, v: Tensor, key_weights: Tensor | None, links: Links, phi: LayerMap, dtype: torch.dtype
) -> tuple[Features, Tensor]:
    chunks, size = links.writes.shape[1:]
    values = with_ones(v.to(dtype), None if key_weights is None else key_weights[..., None])
    return phi.of_keys(chunk_keys(k.to(dtype), size, chunks)), chunk_keys(values, size, chunks)
