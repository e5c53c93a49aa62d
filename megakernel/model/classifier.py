"""The head that assigns documents to classes, or a number to each."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layer_inputs import IGNORED, LayerInputs
from .settings import ModelSettings, drawn_from


class ClassifierHead(nn.Module):
    """One vector for each document, two of them put beside each other, then a matrix or an MLP to the classes.

    Small and replicated: every tensor rank computes all of it.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        model = settings.model
        assert model.classifier is not None
        self.form = model.classifier
        self.tp = settings.mesh.tp
        self.sharded = settings.mesh.sequence_parallel
        width = model.hidden_size * (4 if self.form.documents == 2 else 1)
        with drawn_from(settings.seed, "head"):
            self.inner = (
                _linear(width, model.hidden_size, model.init_std) if self.form.head == "mlp" else None
            )
            width = width if self.inner is None else model.hidden_size
            self.output = _linear(width, self.form.num_classes, model.init_std)

    def forward(self, layer_inputs: LayerInputs) -> Tensor:
        """The loss: this rank's share of the mean cross entropy in nats of all examples of the global batch.

        Outside training (2,): also its share of their accuracy. Of a regression: the mean squared error alone.
        """
        hidden, positions, labels, num_targets = layer_inputs
        logits = self.logits(hidden, positions)
        if self.form.num_classes == 1:
            errors = (logits.squeeze(-1) - labels).masked_fill(labels == IGNORED, 0.0)
            return errors.square().sum() / num_targets.squeeze()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if self.training:
            return loss / num_targets.squeeze()
        # No class is IGNORED, so what does not count is never right.
        right = (logits.argmax(-1) == labels).sum()
        return torch.stack([loss, right.to(loss.dtype)]) / num_targets

    def logits(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (N, B, C) at positions (B, N) -> float32 logits (examples, classes)."""
        documents = self._pooled(hidden, positions).to(self.output.weight.dtype)
        if self.form.documents == 2:
            a, b = documents[0::2], documents[1::2]
            documents = torch.cat([a, b, a * b, a - b], dim=-1)
        if self.inner is not None:
            documents = F.gelu(self.inner(documents))
        return self.output(documents).float()

    def _pooled(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """(B, C) float32: the mean over a row's tokens, or the state of the token that begins it."""
        takes = (positions >= 0) if self.form.pooling == "mean" else (positions == 0)
        weights = takes / takes.sum(1, keepdim=True)
        if self.sharded:
            weights = weights.chunk(self.tp.size, dim=1)[self.tp.rank]
        pooled = torch.einsum("bn,nbc->bc", weights, hidden.float())
        if not self.sharded:
            return pooled
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        return reduce_from_tensor_model_parallel_region(pooled, group=self.tp.group)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer
