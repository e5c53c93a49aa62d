"""Kernel attention's launches, registered as a differentiable PyTorch operator.

Keys k are (B, H_kv, N, d); with priors (H_kv, M), the M keys of a position are adjacent, (B, H_kv, N, M d).
"""

from collections.abc import Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import kernels, key_kernels, query_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Rows, SequenceInfo, State, Tokens
from megakernel.ops.kernel_attention.decay import Decay, gradient_of_decay
from megakernel.ops.kernel_attention.differentiable import Operator
from megakernel.ops.kernel_attention.exchanged import QueryBackward, Saved, StatesBackward
from megakernel.ops.kernel_attention.launches import Launcher, map_of_call, output_buffer


class KernelLaunches(NamedTuple):
    """Implements `exchanged.Launches`; the tensors of keys are those of `attend`, the tensor of queries is q."""

    launcher: Launcher
    matrix_parameter: Tensor | None
    seq: SequenceInfo
    keys: Keys
    """Without features."""

    matrix: Matrix
    normalize: bool

    @staticmethod
    def of(options: Sequence[Any], q: Tensor, tensors: Tensors) -> "KernelLaunches":
        """options: the values of OPTIONS."""
        k, v, matrix, log_decay, key_weights, priors, starts = tensors
        *_, causal, normalize, start = options
        launcher = Launcher.of(q, k, v, priors, map_of_call(options, q, tensors), causal, start)
        key_weights, priors = (
            None if x is None else x.to(torch.float32).contiguous() for x in (key_weights, priors)
        )
        keys = Keys(Tokens(Rows.of(k), None, None), Rows.of(v), key_weights, priors)
        decay = None
        if log_decay is not None:
            decay = Decay.of_tokens(log_decay, launcher.segment, q.shape[-1] ** -0.5)
        seq = launcher.seq._replace(starts=starts, decay=decay)
        return KernelLaunches(launcher, matrix, seq, keys, Matrix.of(matrix, k.shape[1]), normalize)

    @property
    def k(self) -> Tensor:
        """Keys."""
        return self.keys.tokens.rows.pointer

    @property
    def v(self) -> Tensor:
        """Values."""
        return self.keys.v.pointer

    def key_buffers(self) -> Tensors:
        """Buffers for r of queries, key features, their log scales, and the split projection; some may be empty."""
        k = self.k
        scale = k.new_empty(*k.shape[:2], self.seq.queries * self.launcher.phi.unbounded, dtype=torch.float32)
        features, logs = self.launcher.feature_buffers(k)
        return (
            scale,
            k.new_empty(0) if features is None else features,
            scale.new_empty(0) if logs is None else logs,
            self.matrix.buffer(k.dtype, k),
        )

    def output_buffers(self, queries: Tensors) -> Tensors:
        """Buffers for outputs and 1 / den."""
        lead = queries[0].shape[:3]
        return output_buffer(queries[0], self.v), self.v.new_empty(lead, dtype=torch.float32)

    def empty_queries(self, q: Tensor) -> Tensors:
        """See `exchanged.Launches`."""
        return (q,)

    def keys_and_matrix(self, saved: Tensors) -> tuple[Keys, Matrix]:
        """The keys with their stored features, and the projection."""
        _, *features, terms = saved
        tokens = Tokens(self.keys.tokens.rows, *(x if x.numel() else None for x in features))
        return self.keys._replace(tokens=tokens), self.matrix.split(terms)

    def write(self) -> tuple[State, Tensors]:
        """See `exchanged.Launches`."""
        launcher, saved = self.launcher, self.key_buffers()
        scale = saved[0] if launcher.causal and launcher.phi.unbounded else None
        buffer = launcher.segment_buffer(self.k, self.seq.keys)
        self.matrix.fill(saved[-1])
        launcher.launch(
            kernels.write_keys, len(self.k), *self.keys_and_matrix(saved), buffer, self.seq, scale
        )
        return buffer, saved

    def read(self, queries: Tensors, saved: Tensors, state: State) -> Tensors:
        """Outputs and 1 / den."""
        (q,), (out, reciprocal) = queries, self.output_buffers(queries)
        scale = saved[0] if self.launcher.phi.unbounded else None
        inputs = (Rows.of(q), *self.keys_and_matrix(saved), state, self.seq)
        outputs = (Rows.to_write(out), reciprocal, scale)
        self.launcher.launch(kernels.read, len(q), *inputs, *outputs, NORMALIZE=self.normalize)
        return out, reciprocal

    def bwd_read(self, grad: Tensor, queries: Tensors, saved: Saved, needs_matrix: bool) -> QueryBackward:
        """See `exchanged.Launches`."""
        launcher, (q,), (out, reciprocal) = self.launcher, queries, saved.queries
        dq, dy = q.new_empty(q.shape), self._projected(q) if needs_matrix else None
        bwd_queries = Queries(
            Tokens(Rows.of(q), *launcher.feature_buffers(q)),
            Rows.of(grad),
            reciprocal,
            torch.empty_like(reciprocal) if self.normalize else None,
            saved.keys[0] if launcher.phi.unbounded else None,
        )
        inputs = (bwd_queries, *self.keys_and_matrix(saved.keys), saved.state, self.seq)
        reads_output = self.normalize and not launcher.phi.unbounded
        outputs = (Rows.of(out) if reads_output else None, dq, dy)
        launcher.launch(query_kernels.bwd_dq, len(q), *inputs, *outputs, NORMALIZE=self.normalize)
        matrix_grad = None if dy is None else cache(partial(products_of_tokens, dy, q, self.seq.heads))
        return QueryBackward(bwd_queries, (dq,), matrix_grad)

    def bwd_write(self, query_backward: QueryBackward, saved: Tensors, states: StatesBackward) -> Tensors:
        """Gradients of keys, values, projection, decays, key weights and priors."""
        launcher, k = self.launcher, self.k
        dk, dv = k.new_empty(k.shape), self.v.new_empty(self.v.shape)
        dy = self._projected(k, max(launcher.keys, 1)) if query_backward.matrix_grad is not None else None
        key_weights, decay = self.keys.key_weights, self.seq.decay
        dkey_weights = None
        if key_weights is not None or decay is not None:
            dkey_weights = k.new_empty(k.shape[:3], dtype=torch.float32)
        dprior_parts = (
            k.new_empty(*k.shape[:3], launcher.keys, dtype=torch.float32) if launcher.keys else None
        )
        inputs = (query_backward.queries, *self.keys_and_matrix(saved), states.of_queries, self.seq)
        for buffers in launcher.split_dkv((dk, dv, dy, dkey_weights, dprior_parts)):
            launcher.launch(key_kernels.bwd_dkv, len(k), *inputs, *buffers)
        dpriors = None if dprior_parts is None else dprior_parts.sum((0, 2))
        dmatrix = None
        if dy is not None and query_backward.matrix_grad is not None and self.matrix_parameter is not None:
            keys = k.unflatten(-1, (max(launcher.keys, 1), -1)).movedim(3, 2).flatten(1, 2)
            of_keys = products_of_tokens(dy.movedim(0, 2).flatten(1, 2), keys, self.seq.heads)
            dmatrix = gradient_of_matrix(self.matrix_parameter, of_keys, query_backward.matrix_grad())
        if decay is None or dkey_weights is None:
            return dk, dv, dmatrix, None, dkey_weights, dpriors, None
        # Weights are linear in q, so q.dq is the gradient of the log scale of a query's weights.
        q, (dq, *_) = query_backward.queries.tokens.rows.pointer, query_backward.grads
        of_queries = (q.float() * dq).sum(-1).unflatten(1, (self.seq.heads, -1)).sum(2)
        sums = (dkey_weights, of_queries, *states.of_entering)
        dlog_decay = gradient_of_decay(*sums, self.seq, launcher.segment, decay_after_read=False)
        return dk, dv, dmatrix, dlog_decay, None, dpriors, None

    def _projected(self, tokens: Tensor, *lead: int) -> Tensor:
        """A buffer for the gradients of projected tokens."""
        return tokens.new_empty(*lead, *tokens.shape[:3], self.launcher.phi.rows)


def products_of_tokens(dy: Tensor, x: Tensor, heads: int) -> Tensor:
    """The sum over tokens of dy x^T, (heads, M, d), for dy (B, H, N, M) and x (B, H, N, d).

    H is a multiple of `heads`, whose members are adjacent. The sum over more than one product is float32.
    """
    # A product per sequence reads views of it. One product over the batch would copy both operands.
    products = [torch.bmm(dy_part.transpose(1, 2), x_part) for dy_part, x_part in zip(dy, x)]
    if len(products) == 1 and heads == dy.shape[1]:
        return products[0]
    return torch.stack(products).unflatten(1, (heads, -1)).sum((0, 2), dtype=torch.float32)


def gradient_of_matrix(matrix: Tensor, *parts: Tensor) -> Tensor:
    """The gradient of matrix (M, d) or (H_kv, M, d), from parts (H_kv, M, d) that are summed in float32."""
    per_head = reduce(torch.add, parts[1:], parts[0].float()).to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head


OPTIONS = {"feature_map": str, "components": int, "causal": bool, "normalize": bool, "start": int}

attend = Operator("kernel_attention", OPTIONS, KernelLaunches.of, queries=1, keys=7, saved=4)
"""Takes q; k, v, matrix, log_decay, key_weights, priors and starts; and an initial state.

log_decay requires the map `identity` without normalizer, key weights or priors; weights are then divided by sqrt(d)."""
