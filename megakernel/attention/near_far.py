"""An exact window and landmarks of what lies before it: what joins the two parts (docs/formulas.md, 4)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megakernel.attention.heads import HeadShard, LayerSettings, Seed, generator
from megakernel.attention.layer import AttentionLayer
from megakernel.config.algebra import BlockCompression
from megakernel.config.attention import Attention

SHUT = -1e4
"""Logit of a share that is 0 exactly, and so is its gradient: e^-10000. Its negative is that of the whole."""


class NearDropout(nn.Module):
    """With probability p(step) a head's gate gives the near part nothing during a training step.

    Which heads is a function of (seed, step, head): micro-batches and recomputations of a step and all ranks agree, and
    no checkpoint need hold it. A token that sees nothing far keeps its near part, as ever (docs/formulas.md, 4).
    """

    shut: Tensor
    """(H,) bool, of this shard's query heads."""

    def __init__(
        self,
        probability: Callable[[int], float],
        query_heads: range,
        heads: HeadShard,
        seed: Seed,
        device: torch.device,
    ):
        """probability: step, counted from 0 -> p in [0, 1]. query_heads: those of the shard `heads`."""
        super().__init__()
        self.probability = probability
        self.query_heads, self.total = query_heads, len(query_heads) * heads.size
        self.seed = seed
        self.register_buffer(
            "shut", torch.zeros(len(query_heads), dtype=torch.bool, device=device), persistent=False
        )

    def redraw(self, step: int) -> None:
        """Choose the heads of `step`; see `attention.redraw`."""
        probability = self.probability(step)
        if probability == 0:
            self.shut.zero_()
            return
        stream = generator(self.seed, "near dropout", step)
        draws = torch.rand(self.total, generator=stream, device="cpu")
        self.shut.copy_(draws[self.query_heads.start : self.query_heads.stop] < probability)

    def forward(self, gate: Tensor) -> Tensor:
        """Logits (B, H, N) or (H, 1) of the near part's share, shut where they are to be; in evaluation none are."""
        return gate.masked_fill(self.shut[:, None], SHUT) if self.training else gate


class NearFarAttention(AttentionLayer):
    """A window of blocks attended exactly, and r landmarks of every block before it.

    A gate joins the parts, each normalized on its own, or one normalizer does. Then far_mass (beta) scales the
    landmarks of a key head where near and far share phi, and far_weight (gamma) scales them for a query head beside a
    softmax.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        assert isinstance(form.compression, BlockCompression)
        assert form.near is not None
        self.near, self.far_rope = form.near, form.far_rope
        self.rank, self.block_size = form.compression.rank, form.compression.block_size
        self.near_window = (self.block_size, self.near.blocks)
        self.near_dropout: NearDropout | None = None

    def learn_join(self) -> None:
        """Make the parameters that join the parts."""
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
        """Tokens of a window and of the tail that a sequence carries."""
        return self.block_size * self.near.blocks

    @property
    def is_gated(self) -> bool:
        """Whether a gate joins the near and the far part."""
        return self.near.kind == "softmax" and self.near.join == "gated"

    def gate(self, q: Tensor) -> Tensor | None:
        """Logits (B, H, N) or (H, 1) of the near part's share, of queries (B, H, N, d); None without a gate."""
        if not self.is_gated:
            return None
        gate = self.gate_bias[:, None]
        if self.near.gate == "token":
            gate = (q @ self.gate_weight[..., None].to(q.dtype))[..., 0] + gate
        return gate if self.near_dropout is None else self.near_dropout(gate)

    def drop_near(self, probability: Callable[[int], float], seed: Seed) -> None:
        """Shut the near window of heads from now on, with this probability of a step: see `NearDropout`.

        Raises ValueError where no gate joins the near and the far part.
        """
        if not self.is_gated:
            raise ValueError(
                f"near.join={self.near.join} of near.kind={self.near.kind} has no gate to shut; use gated"
            )
        self.near_dropout = NearDropout(
            probability, self.query_heads, self.heads, seed, self.gate_bias.device
        )
