"""Encoder and decoder in one list of layers: each maps the rows of sources and targets to such rows.

The rows of a batch are source and target of its first example, then those of the next one (`data_pipeline/pairs.py`).
An encoder's layers compute the rows of sources and pass on the others. A decoder's layers compute those of targets,
which also read their source, and pass on the sources. The last norm leaves the targets alone to the head.
"""

from typing import Any

import torch
from torch import Tensor

from .cross_attention import CrossAttention
from .dropout import PlacedDropout, own_tokens
from .head import FinalNorm
from .layer import TransformerLayer, norms
from .layer_inputs import LayerInputs
from .settings import ModelSettings, seeded_by


def _rows(x: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """The rows of sources, and those of targets; views."""
    sources, targets = x.unflatten(dimension, (-1, 2)).unbind(dimension + 1)
    return sources, targets


def _joined(sources: Tensor, targets: Tensor) -> Tensor:
    """Hidden states (N, 2 E, C) of sources and targets (N, E, C)."""
    return torch.stack((sources, targets), 2).flatten(1, 2)


class SourceLayer(TransformerLayer):
    """A layer of the encoder."""

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Hidden states (N, 2 E, C) to hidden states, of which the targets' are the same."""
        hidden, positions, *rest = inputs
        sources, targets = _rows(hidden, 1)
        counts, numbers = rest[:2], rest[2:]  # labels and numbers of targets are those of examples
        own = (_rows(x, 0)[0] for x in numbers)
        sources = self.encode(sources, _rows(positions, 0)[0], *counts, *own)
        return (_joined(sources, targets), *inputs[1:])

    def encode(self, *inputs: Tensor) -> Tensor:
        """The hidden states (N, B, C) for LayerInputs of sources alone."""
        return super().forward(inputs)[0]


class SourceNorm(FinalNorm):
    """The norm of the encoder's output, which all layers of the decoder read."""

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Hidden states (N, 2 E, C) to hidden states, of which the targets' are the same."""
        hidden, *rest = inputs
        sources, targets = _rows(hidden, 1)
        return (_joined(self.norm(sources), targets), *rest)


class TargetLayer(TransformerLayer):
    """A layer of the decoder: z = y + cross_attention(norm(y), sources) stands between attention and MLP."""

    def __init__(self, settings: ModelSettings, index: int):
        super().__init__(settings, index)
        self.cross_dropout = PlacedDropout.at(
            settings.model.dropout.residual, "residual of cross attention", index
        )
        with seeded_by(settings.seed, "cross attention", index):
            before, after = norms(settings)
            self.cross_norm = before()
            self.cross_attention = CrossAttention(settings, index)
            self.cross_post_norm = after()

    @property
    def matrices(self) -> list[Any]:
        """See TransformerLayer."""
        cross = self.cross_attention
        return [*super().matrices, cross.query, cross.key_value, cross.output]

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Hidden states (N, 2 E, C) to hidden states, of which the sources' are the same."""
        targets = super().forward(inputs)[0]
        return (_joined(_rows(inputs[0], 1)[0], targets), *inputs[1:])

    def _compute(self, hidden: Tensor, positions: Tensor, numbers: Tensor | None) -> Tensor:
        """The targets' hidden states (N, E, C) for all of them (N, 2 E, C), as one function for recomputation."""
        sources, targets = _rows(hidden, 1)
        source_positions, target_positions = _rows(positions, 0)
        numbers = None if numbers is None else _rows(numbers, 0)[1]
        own = own_tokens(numbers, self.mesh)
        residual, normed = self._pre_norm(targets)
        attention = self._branch(
            self.self_attention(normed, target_positions, numbers), self.attention_post_norm
        )
        residual = residual + (attention if own is None else self.attention_dropout(attention, own))
        of_source = self.cross_attention(self.cross_norm(residual), sources, source_positions >= 0, numbers)
        return self._add_both(residual, of_source, targets, own, self.cross_post_norm, self.cross_dropout)

    def extend_target(
        self, hidden: Tensor, positions: Any, sources: Tensor | None, real: Tensor | None, state: Any
    ) -> tuple[Tensor, Any]:
        """`forward` for tokens (N, B, C) that continue those in `state`; also the new state.

        sources (S, B, C), real (B, S): the encoder's output and its tokens without padding, in the first call, whose
        state is None.
        """
        own, of_source = state or (None, None)
        residual, normed = self._pre_norm(hidden)
        attention, own = self.self_attention.extend(normed, positions, own)
        residual = residual + self._branch(attention, self.attention_post_norm)
        attention, of_source = self.cross_attention.extend(
            self.cross_norm(residual), sources, real, of_source
        )
        return self._add_both(residual, attention, hidden, norm=self.cross_post_norm), (own, of_source)


class TargetNorm(FinalNorm):
    """The norm before the head, which sees the targets alone."""

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Hidden states (N, 2 E, C) at positions (2 E, N) to those of targets, normalized."""
        hidden, positions, *rest = inputs
        return (self.norm(_rows(hidden, 1)[1]), _rows(positions, 0)[1], *rest)
