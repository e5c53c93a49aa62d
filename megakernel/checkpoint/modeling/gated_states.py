"""Linear attention with a state that decays: RetNet, Mamba-2, simple GLA and gated DeltaNet."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration import MegakernelConfig
from .layers import Attention, Documents, Rotary, precise

STATE_CHUNK = 64  # tokens whose weights for each other are computed explicitly


class GatedStateAttention(Attention, kind="gated_state"):
    """S_i = a_i S_(i-1) + k_i v_i^T and o_i = q_i^T S_i / sqrt(d), with a decay a_i per key head.

    decay `fixed`: 1 - 2^(-5-h) for key head h (RetNet); `gate`: sigmoid(w.x_i + b)^(1/normalizer); `step`:
    exp(-A t_i) with t_i = softplus(w.x_i + b), which also scales v_i (Mamba-2); `none`: 1. With update `delta` a token
    replaces a share of what its key stores: S_i = a_i (I - b_i k_i k_i^T) S_(i-1) + b_i k_i v_i^T (gated DeltaNet).
    """

    def __init__(self, config: MegakernelConfig, options: dict[str, Any], rotary: Rotary | None):
        super().__init__(config, options, rotary)
        gla = options["simple_gla"]
        self.decay, self.normalizer = gla["decay"], gla["gate_logit_normalizer"]
        self.has_strength = gla["update"] == "delta"
        self.has_decay = self.decay in ("gate", "step")
        if self.has_decay:
            self.decay_bias = nn.Parameter(torch.empty(self.kv_heads))
        if self.decay == "step":
            self.log_decay_rate = nn.Parameter(torch.empty(self.kv_heads))

    def forward(self, q, k, v, positions, state=None, decay=None, strength=None):
        """See Attention."""
        q, k, values = (precise(x) for x in (self.rotated(q, positions), self.rotated(k, positions), v))
        if self.has_strength:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
            strength = strength.to(k.dtype).sigmoid()
        log_decay, step = self.log_decay_and_step(k, decay)
        if step is not None and not self.has_strength:
            values = values * step[..., None]
        if state is None:
            state = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
        queries = self.by_key_head(q * self.head_dim**-0.5).split(STATE_CHUNK, 3)
        tokens = [k, values, log_decay, log_decay if strength is None else strength]
        chunks = zip(queries, *(x.split(STATE_CHUNK, 2) for x in tokens), positions.split(STATE_CHUNK, 1))
        outputs = []
        for chunk in chunks:
            output, state = self.chunk(chunk, state)
            outputs.append(output)
        return torch.cat(outputs, 3).flatten(1, 2).to(v.dtype), state

    def log_decay_and_step(self, k: Tensor, logits: Any) -> tuple[Tensor, Tensor | None]:
        """log a (B, H_kv, N), and t or None."""
        none = k.new_zeros(k.shape[:3])
        if self.decay == "none":
            return none, None
        if self.decay == "fixed":
            heads = torch.arange(self.kv_heads, device=k.device, dtype=k.dtype)
            return none + torch.log1p(-torch.exp2(-5 - heads))[:, None], None
        logits = logits.to(k.dtype) + self.decay_bias.to(k.dtype)[:, None]
        if self.decay == "gate":
            return F.logsigmoid(logits) / self.normalizer, None
        step = F.softplus(logits)
        return -self.log_decay_rate.to(k.dtype).exp()[:, None] * step, step

    def chunk(self, inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (B, H_kv, G, L, d) of a chunk, and the state (B, H_kv, d, d) after it."""
        q, k, v, log_decay, strength, at = inputs
        documents, logs = Documents.of(at), log_decay.cumsum(-1)
        between = logs[..., :, None] - logs[..., None, :]
        pairs = between.masked_fill(~documents.visible[:, None], -torch.inf).exp()
        kept = logs.exp() * documents.reads[:, None]
        left = (logs[..., -1:] - logs).masked_fill(~documents.writes[:, None], -torch.inf).exp()
        whole = logs[..., -1].exp() * documents.keeps[:, None]
        if self.has_strength:
            # What tokens write, U = b (V - kept K S) - T U with T strictly lower triangular, is a triangular system.
            coupling = strength[..., None] * pairs * (k @ k.mT)
            right = strength[..., None] * (v - kept[..., None] * (k @ state))
            v = torch.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
        scores = q @ k.mT[:, :, None] * pairs[:, :, None]
        from_state = q @ state[:, :, None] * kept[:, :, None, :, None]
        state = whole[..., None, None] * state + (k * left[..., None]).mT @ v
        return scores @ v[:, :, None] + from_state, state
