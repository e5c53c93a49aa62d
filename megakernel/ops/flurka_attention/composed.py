"""Causal FLuRKA composed of the kernels of other ops: an experiment that waits for its time on a GPU.

`triton` computes window and landmarks of a tile of queries in one program. Here they are launches of their own: the
window is chosen blocks' window (`selected_attention.triton`), the landmarks are keys of `kernel_attention`'s kernels,
and one small kernel merges the two outputs. Backward gives both kinds of kernels the same dO, and the weights of the
merge in their normalizers; another small kernel has the gate's gradient, a third the gradients through the pools.
Pools, segments, states and their gradients are those of `triton`, whose launches `ComposedLaunches` holds.

If `python -m benchmarks.kernels.composed` shows that this takes at most 1.1 times as long, the fused kernels go
(docs/results.md).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import token_positions
from megakernel.ops.flurka_attention import composed_kernels, decode, triton
from megakernel.ops.flurka_attention.arguments import MergeParams
from megakernel.ops.flurka_attention.options import FlurkaInputs
from megakernel.ops.flurka_attention.tensors import FlurkaKeyTensors, FlurkaStatic, SavedLandmarks
from megakernel.ops.flurka_attention.triton import FlurkaLaunches
from megakernel.ops.kernel_attention import kernels, query_kernels
from megakernel.ops.kernel_attention.triton import later_products
from megakernel.ops.kernels.arguments import Queries, Rows, SequenceInfo, State, Tokens
from megakernel.ops.kernels.launcher import Grid, Launcher, output_buffer
from megakernel.ops.kernels.operator import Operator
from megakernel.ops.kernels.primitives import cdiv
from megakernel.ops.kernels.protocol import Op, QueryBackward, Saved, StatesBackward
from megakernel.ops.selected_attention.triton import window_backward, window_forward
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail

BLOCKS_AT_ONCE = 4
"""Blocks per program of `pool_gradients`."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    if inputs.options.near == "kernel":
        return "near is kernel; expected near='softmax'"
    if inputs.exchange is not None:
        return "exchange is given; expected whole sequences"
    if not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; expected one dtype"
    return triton.unsupported(q, k, v, inputs)


def attend(
    q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs
) -> tuple[Tensor, KernelState | None, Tail | None]:
    """Arguments and results of `triton.attend`."""
    if decode.unsupported(q, k, v, inputs) is None:
        return decode.step(q, k, v, inputs)
    static, keys = triton.options_and_keys(q, k, v, inputs)
    near_q, near_k = _rotated(q, keys.k, inputs, static.before)
    gate = inputs.gate_logits(q)
    far_weight = inputs.weights.far_weight if gate is None else None
    queries = ComposedQueryTensors(q, near_q, gate, far_weight)
    tensors: tuple[Any, ...] = (near_k, *_window_spans(keys, static, q.shape[2]), *keys)
    every_key = ComposedKeyTensors(*tensors)
    results = composed_operator(static, queries, every_key, *inputs.of_sequence)
    return triton.outputs_and_state(results, q, k, v, inputs)


def _rotated(q: Tensor, k: Tensor, inputs: FlurkaInputs, before: int) -> tuple[Tensor, Tensor]:
    """q and k for windows, of which the first `before` keys are those of the tail."""
    packed: Any = inputs.options.near_rotary
    if packed is None:
        return q, k
    if not before:
        near_q, near_k = packed.rotary.rotate_qk(q, k, inputs.positions)
        return near_q, near_k
    at = token_positions(inputs.positions, q.shape[2], q.device)
    of_tail = at[:, :1] - torch.arange(before, 0, -1, device=q.device)
    return packed(q, at), packed(k, torch.cat([of_tail, at], 1))


def _window_spans(keys: FlurkaKeyTensors, static: FlurkaStatic, length: int) -> tuple[Tensor, Tensor]:
    """The first and the last key of each query's window, (B or 1, N) int32."""
    size = keys.pool_keys.shape[-1]
    token = torch.arange(length, device=keys.k.device, dtype=torch.int32)[None]
    first = keys.windows
    if first is None:
        first = ((token // size - (static.blocks - 1)) * size).clamp(min=static.oldest)
    return first + static.before, token.expand(len(first), -1) + static.before


class ComposedQueryTensors(NamedTuple):
    """Tensors of queries and of the merge, and their gradients."""

    q: Tensor
    """(B, H, N, d)"""

    near_q: Tensor
    """q for windows: rotated."""

    gate: Tensor | None = None
    """See `MergeParams`: all of the logits."""

    far_weight: Tensor | None = None
    """See `MergeParams`."""


class ComposedKeyTensors(NamedTuple):
    """Tensors of keys and landmarks, and their gradients: after the first three those of `FlurkaKeyTensors`."""

    near_k: Tensor
    """k for windows: rotated."""

    first: Tensor
    """The first key of each query's window, (B or 1, N) int32."""

    last: Tensor
    """The last one."""

    k: Tensor
    v: Tensor
    pool_keys: Tensor
    pool_values: Tensor
    projection: Tensor | None = None
    log_decay: Tensor | None = None
    far_mass: Tensor | None = None
    starts: Tensor | None = None
    windows: Tensor | None = None
    ends: Tensor | None = None


class MergedParts(NamedTuple):
    """What the kernels of the two parts say about their weights, (B, H, N) float32."""

    lse: Any
    """Base 2 log-sum-exp of the window."""

    reciprocal: Any
    """1 / den of the landmarks."""

    log_mass: Any
    """The log of den; None with a gate."""


class MergeWeights(NamedTuple):
    """What backward needs of the weights of outputs, (B, H, N) float32."""

    factor: Any
    """Of the sums over landmarks; 0 for queries that see none, and for lost ones."""

    far_share: Any
    """1 - g_i."""

    lse: Any
    """Base 2: weights of the window, times g_i, are 2^(log2 w - lse)."""


class ComposedOutputs(NamedTuple):
    """Outputs (B, H, N, D), those of both parts, the fields of `MergeWeights`, and r (B, H_kv, N) of unbounded maps."""

    out: Tensor
    near: Tensor
    far: Tensor
    factor: Tensor
    far_share: Tensor
    lse: Tensor
    scale: Tensor


class ComposedLaunches(NamedTuple):
    """Implements `kernels.protocol.Launches`."""

    fused: FlurkaLaunches
    """Launches for landmarks, which are the same."""

    near_k: Tensor
    first: Tensor
    last: Tensor

    @staticmethod
    def of(static: FlurkaStatic, q: Tensor, tensors: ComposedKeyTensors) -> "ComposedLaunches":
        """The launches for queries q (B, H, N, d)."""
        near_k, first, last = tensors[:3]
        others: tuple[Any, ...] = tensors[3:]
        return ComposedLaunches(FlurkaLaunches.of(static, q, FlurkaKeyTensors(*others)), near_k, first, last)

    @property
    def launcher(self) -> Launcher:
        """See `Launches`."""
        return self.fused.launcher

    @property
    def seq(self) -> SequenceInfo:
        """See `Launches`."""
        return self.fused.seq

    @property
    def v(self) -> Tensor:
        """Values, beginning with the tail's."""
        v: Tensor = self.fused.window.v.pointer
        return v

    def write(self) -> tuple[State, SavedLandmarks]:
        """See `Launches`."""
        return self.fused.write()

    def key_buffers(self) -> SavedLandmarks:
        """See `Launches`."""
        return self.fused.key_buffers()

    def sum_queries(self, queries: Queries, length: int) -> State:
        """See `Launches`."""
        return self.fused.sum_queries(queries, length)

    def output_buffers(self, queries: ComposedQueryTensors) -> ComposedOutputs:
        """See `Launches`."""
        q, v = queries.q, self.v
        near, factor = v.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)
        scale = factor.new_empty(len(q), self.seq.heads, q.shape[2] * self.launcher.phi.unbounded)
        others = (torch.empty_like(factor), torch.empty_like(factor))
        return ComposedOutputs(output_buffer(q, v), near, torch.empty_like(near), factor, *others, scale)

    def read_ahead(self, queries: ComposedQueryTensors, saved: SavedLandmarks) -> None:
        """None: there are no exchanges."""

    def read(
        self, queries: ComposedQueryTensors, saved: SavedLandmarks, state: State, ahead: None = None
    ) -> ComposedOutputs:
        """See `Launches`."""
        q, launcher, outputs = queries.q, self.launcher, self.output_buffers(queries)
        near, lse = window_forward(queries.near_q, self.near_k, self.v, self.first, self.last)
        outputs = outputs._replace(near=near)
        log_mass = torch.empty_like(lse) if queries.gate is None else None
        parts = MergedParts(lse, torch.empty_like(lse), log_mass)
        scale = outputs.scale if launcher.phi.unbounded else None
        inputs = (Rows.of(q), saved.keys, self.fused.matrix.split(saved.terms), state, self.seq)
        buffers = (Rows.to_write(outputs.far), parts.reciprocal, scale, log_mass)
        grid = Grid.QUERY_TILES
        launcher.launch(kernels.read, len(q), *inputs, *buffers, grid=grid, NORMALIZE=True)
        launcher.launch(
            composed_kernels.merge_outputs,
            *(len(q), Rows.of(near), Rows.of(outputs.far), parts, _merge_params(queries), self.seq),
            *(Rows.to_write(outputs.out), MergeWeights(outputs.factor, outputs.far_share, outputs.lse)),
            grid=grid,
            NEAR=self.fused.near._replace(gated=queries.gate is not None),
        )
        return outputs

    def bwd_read(
        self,
        do: Tensor,
        queries: ComposedQueryTensors,
        saved: Saved,
        dq: Tensor,
        needs_projection: bool,
        *,
        exchanges: bool = False,
    ) -> QueryBackward:
        """See `Launches`."""
        q, launcher, outputs, gated = queries.q, self.launcher, saved.outputs, queries.gate is not None
        unbounded, grid = launcher.phi.unbounded, Grid.QUERY_TILES
        dmerge = torch.empty_like(outputs.factor)
        shift = None if gated else torch.empty_like(dmerge)
        far, of_outputs = Rows.of(outputs.far), Rows.of(do)
        launcher.launch(
            composed_kernels.merge_outputs_backward,
            *(len(q), of_outputs, Rows.of(outputs.near), far, outputs.far_share, self.seq, dmerge, shift),
            grid=grid,
            NEAR=self.fused.near._replace(gated=gated),
        )
        tokens, scale = Tokens(Rows.of(q), *launcher.feature_buffers(q)), outputs.scale if unbounded else None
        bwd_queries = Queries(tokens, of_outputs, outputs.factor, torch.empty_like(dmerge), scale)
        dproj = q.new_empty(*q.shape[:3], launcher.phi.rows) if needs_projection else None
        matrix = self.fused.matrix.split(saved.keys.terms)
        launcher.launch(
            query_kernels.bwd_dq,
            *(len(q), bwd_queries, saved.keys.keys, matrix, saved.state, self.seq),
            *(None if unbounded else far, shift, Rows.to_write(dq), dproj),
            grid=grid,
            NORMALIZE=True,
        )
        # Under one normalizer, the mean is that of all weights.
        out = outputs.near if gated else outputs.out
        inputs = (queries.near_q, self.near_k, self.v, self.first, self.last)
        dnear_q, *of_keys = window_backward(do, *inputs, out, outputs.lse)
        grads, dfar_weight = ComposedQueryTensors(dq, dnear_q), None
        if queries.gate is None:
            dfar_weight = dmerge.sum((0, 2))
            if queries.far_weight is not None:
                grads = grads._replace(far_weight=dfar_weight)
        else:
            grads = grads._replace(gate=dmerge)
        projection_grad = later_products(dproj, q, self.seq.heads)
        return QueryBackward(bwd_queries, grads, projection_grad, (dmerge, dfar_weight, *of_keys))

    def bwd_write(
        self,
        query_backward: QueryBackward,
        saved: SavedLandmarks,
        states: StatesBackward,
        dk: Tensor,
        dv: Tensor,
    ) -> ComposedKeyTensors:
        """See `Launches`; the gradient of values is in the buffer of the windows'."""
        fused, launcher = self.fused, self.launcher
        dmerge, dfar_weight, dnear_k, dv = query_backward.op_saved
        of_landmarks = fused.landmark_gradients(query_backward, saved, states)
        dk.zero_()  # tokens of the last blocks are in no landmark
        pools, batch = fused.pools.of_keys, len(dk)
        parts = cdiv(self.seq.keys // launcher.rank, BLOCKS_AT_ONCE)
        dpools = dmerge.new_empty(2, batch, self.seq.heads, parts, *pools.shape[-2:])
        inputs = (fused.pools, self.seq, of_landmarks.keys, of_landmarks.values)
        buffers = (Rows.to_write(dk), Rows.to_write(dv), *dpools)
        each = BLOCKS_AT_ONCE
        fused.launch_pool(composed_kernels.pool_gradients, batch, each, *inputs, *buffers, EACH=each)
        of_pools = [part.sum((0, 2) if pools.dim() == 3 else (0, 1, 2)) for part in dpools]
        grads = ComposedKeyTensors(dnear_k, self.first, self.last, dk, dv, *of_pools)
        merge = (dmerge, dfar_weight)
        found: ComposedKeyTensors = fused.with_far_gradients(
            grads, query_backward, saved, states, of_landmarks, merge, []
        )
        return found


def _merge_params(queries: ComposedQueryTensors) -> MergeParams:
    gate, far_weight = (None if x is None else x.contiguous() for x in (queries.gate, queries.far_weight))
    return MergeParams(gate, None, far_weight)


composed_operator = Operator(
    "composed_flurka_attention",
    Op(
        ComposedQueryTensors,
        ComposedKeyTensors,
        FlurkaStatic,
        ComposedOutputs,
        SavedLandmarks,
        ComposedLaunches.of,
    ),
)
"""Composed FLuRKA of these tensors and an initial state."""
