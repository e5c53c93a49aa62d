"""Near windows that are shut for some heads at some steps, so that their far part learns to do without."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megakernel.attention.heads import HeadShard, Seed, generator

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
