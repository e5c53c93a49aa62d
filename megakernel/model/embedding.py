"""The first layers: token embedding and added position embeddings."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from .dropout import PlacedDropout, own_tokens
from .layer_inputs import LayerInputs, numbers_of
from .linear import embedding
from .settings import ModelSettings, seeded_by


class TokenEmbedding(nn.Module):
    """Token embedding, vocabulary-parallel over the tensor ranks.

    A module of its own, because tied embeddings use its matrix as the output head: a pipeline keeps a copy on the first
    and on the last stage and sums their gradients.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.scattered = settings.mesh.sequence_parallel
        self.multiplier = settings.model.embedding_multiplier
        self.mesh, self.dropout = settings.mesh, _dropout(settings, is_last=settings.model.first_layer == 1)
        with seeded_by(settings.seed, "embedding"):
            self.tokens = embedding(settings)

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Token ids (B, N) to hidden states (N, B, C); N / tp tokens under sequence parallelism."""
        ids, *rest = inputs
        hidden = self.tokens(ids)
        if not self.scattered:  # else the scatter has already moved the sequence first
            # Flattened, a single sequence too gets the strides of what layers return: they share a compiled graph.
            hidden = hidden.transpose(0, 1).flatten(0, 1).view(*ids.T.shape, -1)
        if self.multiplier != 1:
            # The multiplier is first rounded to the dtype, as in Gemma's training.
            hidden = hidden * torch.tensor(self.multiplier, dtype=hidden.dtype).item()
        numbers = numbers_of(inputs) if self.training else None
        return (self.dropout(hidden, own_tokens(numbers, self.mesh)), *rest)


class AddedPositions(nn.Module, ABC):
    """Adds an embedding of each token's position in its document."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.scatter_group = settings.mesh.tp.group if settings.mesh.sequence_parallel else None
        self.mesh, self.dropout = settings.mesh, _dropout(settings, is_last=True)

    @abstractmethod
    def rows(self, positions: Tensor) -> Tensor:
        """Position embeddings (N, B, C) of positions (N, B); values at padding are arbitrary."""

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Hidden states (N, B, C) plus the embeddings of positions (B, N)."""
        hidden, positions, *rest = inputs
        rows = self.rows(positions.transpose(0, 1))
        if self.scatter_group is not None:
            from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

            # Backward gathers, so that every tensor rank gets the whole gradient.
            rows = scatter_to_sequence_parallel_region(rows, group=self.scatter_group)
        numbers = numbers_of(inputs) if self.training else None
        hidden = self.dropout(hidden + rows.to(hidden.dtype), own_tokens(numbers, self.mesh))
        return (hidden, positions, *rest)


class LearnedPositions(AddedPositions):
    """A table with a learned embedding per position."""

    def __init__(self, settings: ModelSettings):
        super().__init__(settings)
        rows = settings.model.max_positions
        assert rows is not None
        with seeded_by(settings.seed, "positions"):
            weight = torch.empty(rows, settings.model.hidden_size, device=settings.device)
            self.weight = nn.Parameter(weight)
            settings.embedding_init_method(self.weight)

    def rows(self, positions: Tensor) -> Tensor:
        """See AddedPositions."""
        return nn.functional.embedding(positions.clamp(min=0), self.weight)


class SinusoidalPositions(AddedPositions):
    """Sines and cosines with wavelengths from 2 pi to 10,000 x 2 pi tokens.

    Scaled to the initial standard deviation of the token embeddings, so that neither dominates.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__(settings)
        self.width = settings.model.hidden_size
        self.amplitude = settings.model.embedding_std * 2**0.5

    def rows(self, positions: Tensor) -> Tensor:
        """See AddedPositions."""
        # Angles in float64: at position 10^6 a float32 angle is off by 0.06.
        exponents = torch.arange(0, self.width, 2, device=positions.device, dtype=torch.float64) / self.width
        angles = positions[..., None] * 10_000.0**-exponents
        waves = torch.cat([angles.sin(), angles.cos()], -1)[..., : self.width]
        return self.amplitude * waves


def _dropout(settings: ModelSettings, is_last: bool) -> PlacedDropout:
    """Dropout of the sum of all embeddings, thus behind the last of them."""
    return PlacedDropout.at(settings.model.dropout.embedding if is_last else 0.0, "embedding")
