"""The launches of kernel attention as operators that PyTorch differentiates and compiles.

Keys k are (B, H_kv, N, d), or with priors (H_kv, M) the M keys of a position beside each other, (B, H_kv, N, M d).
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
from megakernel.ops.kernel_attention.exchanged import QueryBackward, StateGradients
from megakernel.ops.kernel_attention.launches import Call


class KernelLaunches(NamedTuple):
    """See `exchanged.Launches`; tensors of keys are those of `attend`, of queries q."""

    call: Call
    given_matrix: Tensor | None
    seq: SequenceInfo
    keys: Keys
    """Without features."""

    whole: Matrix
    normalize: bool

    @staticmethod
    def of(form: Sequence[Any], q: Tensor, tensors: Tensors) -> "KernelLaunches":
        """form: the values of OPTIONS."""
        k, v, matrix, key_weights, priors, log_decay, starts = tensors
        feature_map, components, causal, normalize, start = form
        decays = log_decay is not None
        call = Call.of(q, k, v, matrix, priors, feature_map, components, causal, start, decays)
        key_weights, shares = (
            None if x is None else x.to(torch.float32).contiguous() for x in (key_weights, priors)
        )
        keys = Keys(Tokens(Rows.of(k), None, None), Rows.of(v), key_weights, shares)
        whole = Matrix.whole(matrix, k.shape[1])
        decay = None
        if log_decay is not None:
            decay = Decay.of_tokens(log_decay, call.segment, q.shape[-1] ** -0.5)
        seq = call.seq._replace(starts=starts, decay=decay)
        return KernelLaunches(call, matrix, seq, keys, whole, normalize)

    @property
    def k(self) -> Tensor:
        """Of keys."""
        return self.keys.tokens.rows.pointer

    @property
    def v(self) -> Tensor:
        """Of values."""
        return self.keys.v.pointer

    def saved(self) -> Tensors:
        """Buffers for r of queries, features of keys, their log scales, and the projection; some may be empty."""
        k = self.k
        scale = k.new_empty(*k.shape[:2], self.seq.queries * self.call.phi.unbounded, dtype=torch.float32)
        features, logs = self.call.features(k, self.call.stored)
        return (
            scale,
            k.new_empty(0) if features is None else features,
            scale.new_empty(0) if logs is None else logs,
            self.whole.buffer(k.dtype, k),
        )

    def found(self, queries: Tensors) -> Tensors:
        """A buffer for outputs and 1 / den."""
        lead = queries[0].shape[:3]
        return self.v.new_empty(*lead, self.call.values), self.v.new_empty(lead, dtype=torch.float32)

    def no_queries(self, q: Tensor) -> Tensors:
        """See `exchanged.Launches`."""
        return (q,)

    def known(self, saved: Tensors) -> tuple[Keys, Matrix]:
        """The keys with the features that are stored of them, and the projection."""
        _, *stored, terms = saved
        tokens = Tokens(self.keys.tokens.rows, *(x if x.numel() else None for x in stored))
        return self.keys._replace(tokens=tokens), self.whole.split(terms)

    def write(self) -> tuple[State, Tensors]:
        """See `exchanged.Launches`."""
        call, saved = self.call, self.saved()
        scale = saved[0] if call.causal and call.phi.unbounded else None
        buffer = call.sums_of_segments(self.k, self.seq.keys)
        self.whole.fill(saved[-1])
        call.start(kernels.write_keys, len(self.k), *self.known(saved), buffer, self.seq, scale)
        return buffer, saved

    def read(self, queries: Tensors, saved: Tensors, state: State) -> Tensors:
        """Outputs and 1 / den."""
        (q,), (out, reciprocal) = queries, self.found(queries)
        scale = saved[0] if self.call.phi.unbounded else None
        known = (Rows.of(q), *self.known(saved), state, self.seq)
        self.call.start(kernels.read, len(q), *known, out, reciprocal, scale, NORMALIZE=self.normalize)
        return out, reciprocal

    def bwd_read(
        self, grad: Tensor, queries: Tensors, found: Tensors, saved: Tensors, state: State, learned: bool
    ) -> QueryBackward:
        """See `exchanged.Launches`."""
        call, (q,), (reciprocal,) = self.call, queries, found
        dq, dy = q.new_empty(q.shape), self._projected(q) if learned else None
        known = Queries(
            Tokens(Rows.of(q), *call.features(q, call.stored)),
            Rows.of(grad),
            reciprocal,
            torch.empty_like(reciprocal) if self.normalize else None,
            saved[0] if call.phi.unbounded else None,
        )
        given = (known, *self.known(saved), state, self.seq)
        once = self.normalize and not call.stored
        kernel = query_kernels.bwd_dq_one_pass if once else query_kernels.bwd_dq
        call.start(kernel, len(q), *given, dq, dy, NORMALIZE=self.normalize)
        of_matrix = None if dy is None else cache(partial(products_of_queries, dy, q, self.seq.heads))
        return QueryBackward(known, (dq,), of_matrix)

    def bwd_write(
        self,
        query_backward: QueryBackward,
        saved: Tensors,
        state: State,
        along: Tensor | None,
        last: StateGradients | None,
        first: StateGradients | None,
    ) -> Tensors:
        """Gradients of keys, values, projection, key weights, priors and decays."""
        call, k = self.call, self.k
        dk, dv = k.new_empty(k.shape), self.v.new_empty(self.v.shape)
        dy = self._projected(k, max(call.keys, 1)) if query_backward.of_matrix is not None else None
        key_weights, decay = self.keys.key_weights, self.seq.decay
        dkey_weights = None
        if key_weights is not None or decay is not None:
            dkey_weights = k.new_empty(k.shape[:3], dtype=torch.float32)
        parts = k.new_empty(*k.shape[:3], call.keys, dtype=torch.float32) if call.keys else None
        known = (query_backward.queries, *self.known(saved), state, self.seq)
        for wanted in call.halves((dk, dv, dy, dkey_weights, parts)):
            call.start(key_kernels.bwd_dkv, len(k), *known, *wanted)
        dpriors = None if parts is None else parts.sum((0, 2))
        dmatrix = None
        if dy is not None and query_backward.of_matrix is not None and self.given_matrix is not None:
            of_keys = k.unflatten(-1, (max(call.keys, 1), -1)).movedim(3, 2)
            of_keys = products_of_tokens(dy.movedim(0, 2), of_keys)
            dmatrix = gradient_of_matrix(self.given_matrix, of_keys, query_backward.of_matrix())
        if decay is None or dkey_weights is None:
            return dk, dv, dmatrix, dkey_weights, dpriors, None, None
        # Weights are linear in q: what a change of all weights of a query by a factor changes.
        q, (dq, *_) = query_backward.queries.tokens.rows.pointer, query_backward.grads
        of_queries = (q.float() * dq).sum(-1).unflatten(1, (self.seq.heads, -1)).sum(2)
        of_first = None if first is None else first.along()
        dlog_decay = gradient_of_decay(
            dkey_weights, of_queries, along, of_first, self.seq, call.segment, late=False
        )
        return dk, dv, dmatrix, None, dpriors, dlog_decay, None

    def _projected(self, tokens: Tensor, *lead: int) -> Tensor:
        """A buffer for the gradients of projected tokens."""
        return tokens.new_empty(*lead, *tokens.shape[:3], self.call.phi.rows)


def products_of_tokens(dy: Tensor, x: Tensor) -> Tensor:
    """The sum over tokens of dy x^T, (H_kv, M, d); dy (B, H_kv, G, N, M) and x (B, H_kv, G, N, d)."""
    return torch.einsum("bhgnm,bhgnd->hmd", dy, x)


def products_of_queries(dy: Tensor, x: Tensor, heads: int) -> Tensor:
    """The same of dy (B, H, N, M) and x (B, H, N, d), which G heads of each of H_kv `heads` of keys have."""
    return products_of_tokens(dy.unflatten(1, (heads, -1)), x.unflatten(1, (heads, -1)))


def gradient_of_matrix(matrix: Tensor, *parts: Tensor) -> Tensor:
    """The sum of parts (H_kv, M, d), in float32, as the gradient of matrix (M, d) or (H_kv, M, d)."""
    per_head = reduce(torch.add, parts[1:], parts[0].float()).to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head


OPTIONS = {"feature_map": str, "components": int, "causal": bool, "normalize": bool, "start": int}

attend = Operator("kernel_attention", OPTIONS, KernelLaunches.of, queries=1, keys=7, saved=4)
"""Of q; k, v, matrix, key_weights, priors, log_decay and starts; and a first state.

With log_decay: the map `identity` without normalizer, weights or priors, all weights divided by sqrt(d)."""
