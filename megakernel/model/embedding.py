"""The first layers: token ids to hidden states, and learned positions."""

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding, scatter_to_sequence_parallel_region
from torch import nn

from .settings import ModelSettings, drawn_from
from .stream import Stream


class TokenEmbedding(nn.Module):
    """Token ids (B, N) to hidden states (N, B, C), the vocabulary cut over the tensor ranks.

    Its matrix is also the output head where embeddings are tied, which is why it is a module of its own: a pipeline
    keeps one copy on the first and one on the last stage and sums their gradients.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        transformer = settings.transformer
        with drawn_from(settings.seed, "embedding"):
            self.tokens = VocabParallelEmbedding(
                settings.vocab_size,
                settings.model.hidden_size,
                init_method=transformer.init_method,
                reduce_scatter_embeddings=settings.mesh.sequence_parallel,
                config=transformer,
                tp_group=settings.mesh.tp.group,
            )

    def forward(self, stream: Stream) -> Stream:
        """The stream's token ids become hidden states (N, B, C); N / tp tokens under sequence parallelism."""
        ids, *rest = stream
        hidden = self.tokens(ids)
        if not self.tokens.reduce_scatter_embeddings:  # the scatter has already put the sequence first
            hidden = hidden.transpose(0, 1).contiguous()
        return (hidden, *rest)


class LearnedPositions(nn.Module):
    """Adds a learned vector for each token's position in its document."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        rows = settings.model.max_positions
        assert rows is not None
        self.scatter_group = settings.mesh.tp.group if settings.mesh.sequence_parallel else None
        with drawn_from(settings.seed, "positions"):
            self.weight = nn.Parameter(
                torch.randn(rows, settings.model.hidden_size) * settings.model.init_std
            )

    def forward(self, stream: Stream) -> Stream:
        """Hidden states (N, B, C) plus the table's rows at positions (B, N)."""
        hidden, positions, *rest = stream
        rows = nn.functional.embedding(positions.transpose(0, 1), self.weight)
        if self.scatter_group is not None:  # backward gathers, so every tensor rank sees the whole gradient
            rows = scatter_to_sequence_parallel_region(rows, group=self.scatter_group)
        return (hidden + rows, positions, *rest)
