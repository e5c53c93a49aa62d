"""The merge of an exact local window with landmarks of earlier blocks (docs/formulas.md, 4)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megakernel.attention.heads import HeadShard, LayerSettings, Seed, generator
from megakernel.attention.layer import AttentionLayer
from megakernel.config.algebra import BlockCompression
from megakernel.config.attention import Attention
from megakernel.ops.projections import logits_per_head

CLOSED_LOGIT = -1e4
"""Logit of a share that is exactly 0, as is its gradient (e^-10000 underflows). Its negative gives exactly 1."""


class WindowDropout(nn.Module):
    """Closes the gate of a head's local window with probability p(step) during a training step.

    The heads are a function of (seed, step, head): all ranks, micro-batches and recomputations of a step agree, and
    checkpoints do not store it. Tokens without far context keep the window, as always (docs/formulas.md, 4).
    """

    dropped: Tensor
    """(H,) bool: query heads of this shard whose window is dropped in this step."""

    def __init__(
        self,
        probability: Callable[[int], float],
        query_heads: range,
        heads: HeadShard,
        seed: Seed,
        device: torch.device,
    ):
        """probability: step, counted from 0, -> p in [0, 1]. query_heads: those of the shard `heads`."""
        super().__init__()
        self.probability = probability
        self.query_heads, self.total = query_heads, len(query_heads) * heads.size
        self.seed = seed
        self.register_buffer(
            "dropped", torch.zeros(len(query_heads), dtype=torch.bool, device=device), persistent=False
        )

    def redraw(self, step: int) -> None:
        """Draw the heads of `step`; see `attention.redraw`."""
        probability = self.probability(step)
        if probability == 0:
            self.dropped.zero_()
            return
        stream = generator(self.seed, "near dropout", step)
        draws = torch.rand(self.total, generator=stream, device="cpu")
        self.dropped.copy_(draws[self.query_heads.start : self.query_heads.stop] < probability)

    def forward(self, gate: Tensor) -> Tensor:
        """Gate logits (H, 1) of the window's share, with dropped heads masked in training."""
        return gate.masked_fill(self.dropped[:, None], CLOSED_LOGIT) if self.training else gate


class NearFarAttention(AttentionLayer):
    """Exact attention to a window of blocks, and r landmarks of every block before it.

    A gate merges the two parts, each normalized separately, or they share one normalizer. In the latter case far_mass
    (beta) scales a key head's landmarks if near and far share phi, and far_weight (gamma) scales a query head's
    landmarks if the window is softmax.
    """

    per_query_head = ("far_weight", "gate_bias", "gate_weight")

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert isinstance(config.compression, BlockCompression)
        assert config.near is not None
        self.near, self.far_rope = config.near, config.far_rope
        self.rank, self.block_size = config.compression.rank, config.compression.block_size
        self.near_window = (self.block_size, self.near.blocks)
        self.near_dropout: WindowDropout | None = None

    def create_merge_parameters(self) -> None:
        """Create the parameters of the merge."""
        heads = len(self.query_heads)
        if self.near.kind == "kernel":
            self.far_mass = nn.Parameter(torch.zeros(len(self.kv_heads)))
        elif self.near.join == "shared":
            self.far_weight = nn.Parameter(torch.zeros(heads))
        else:
            self.gate_bias = nn.Parameter(torch.full((heads,), self.near.gate_bias))
            if self.near.gate == "token":
                self.gate_weight = nn.Parameter(torch.zeros(heads, self.head_dim))

    @property
    def reach(self) -> int:
        """Tokens of a window, and of the tail in a sequence's state."""
        return self.block_size * self.near.blocks

    @property
    def is_gated(self) -> bool:
        """Whether a gate merges the near and the far part."""
        return self.near.kind == "softmax" and self.near.join == "gated"

    def gate_bias_logits(self) -> Tensor | None:
        """Logits (H, 1) of the window's share, without the queries' part; None without a gate."""
        if not self.is_gated:
            return None
        bias = self.gate_bias[:, None]
        return bias if self.near_dropout is None else self.near_dropout(bias)

    def gate(self, q: Tensor) -> Tensor | None:
        """Logits (B, H, N) or (H, 1) of the window's share for queries (B, H, N, d); None without a gate."""
        bias = self.gate_bias_logits()
        if bias is None or self.near.gate != "token":
            return bias
        return logits_per_head(q, self.gate_weight) + bias

    def drop_near(self, probability: Callable[[int], float], seed: Seed) -> None:
        """Drop the local windows of heads from now on, with `probability` of a training step: see `WindowDropout`.

        Raises ValueError if no gate merges the near and the far part.
        """
        if not self.is_gated:
            raise ValueError(
                f"near.join={self.near.join} of near.kind={self.near.kind} has no gate to close; use gated"
            )
        self.near_dropout = WindowDropout(
            probability, self.query_heads, self.heads, seed, self.gate_bias.device
        )
