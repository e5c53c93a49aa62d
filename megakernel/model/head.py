"""The heads: from hidden states to the loss of a language model or classifier.

Vocabulary losses are computed in chunks of tokens, so that a sequence's logits never exist at once.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layer_inputs import IGNORED, LayerInputs
from .linear import column_input, column_linear
from .norm import Norm
from .settings import ModelSettings, seeded_by
from .vocabulary_loss import DistillationTarget, LogitScaling, summed_loss


class FinalNorm(nn.Module):
    """The norm before the head."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.norm = Norm(settings)

    def forward(self, inputs: LayerInputs) -> LayerInputs:
        """Normalized hidden states; the rest of the inputs passes through."""
        hidden, *rest = inputs
        return (self.norm(hidden), *rest)


class OutputHead(nn.Module):
    """An untied output matrix, vocabulary-parallel over the tensor ranks."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.settings = settings
        with seeded_by(settings.seed, "head"):
            self.linear = column_linear(
                settings, settings.model.hidden_size, settings.padded_vocab_size, bias=False
            )

    def forward(self, inputs: LayerInputs, distillation: DistillationTarget | None = None) -> Tensor:
        """The mean loss, see `mean_loss`."""
        return mean_loss(self.linear.weight, inputs, self.settings, distillation)


def mean_loss(
    weight: Tensor,
    inputs: LayerInputs,
    settings: ModelSettings,
    distillation: DistillationTarget | None = None,
) -> Tensor:
    """Cross entropy in nats: this shard's sum over its targets, divided by the number of targets of the global batch.

    With distillation: divergence x T^2 KL(teacher || model) + cross_entropy x that of the labels; the teacher's hidden
    states are (N, B, C'). With settings.z_loss, gradients are those of the loss plus the z-loss, whose value is added
    to `settings.z_loss.share`.

    weight (R / tp, C), padding included; hidden states (N, B, C). Summed over context and data ranks and accumulated
    micro-batches this is the global mean in every layout.
    """
    hidden, _, labels, num_targets, *_ = inputs
    tp, chunk_size, vocab_size = settings.mesh.tp, settings.loss_chunk_size, settings.local_vocab_size
    group, scaling = None if tp.size == 1 else tp.group, LogitScaling.of(settings.model)
    states = [hidden] if distillation is None else [hidden, distillation.hidden]
    states = [column_input(x, settings).flatten(0, 1) for x in states]
    targets = labels.transpose(0, 1).reshape(-1)
    counts = targets != IGNORED
    # Nearly all tokens of a causal model count, and selecting them would synchronize with the GPU.
    if not settings.model.is_causal:  # skip the logits of tokens that do not count
        states, targets = [x[counts] for x in states], targets[counts]
    selected = None if distillation is None else replace(distillation, hidden=states[1])
    z_loss = settings.z_loss if torch.is_grad_enabled() else None
    coefficient = 0.0 if z_loss is None else z_loss.coefficient
    summed, parts = summed_loss(
        states[0], weight, targets, chunk_size, vocab_size, group, scaling, selected, coefficient
    )
    if distillation is not None:
        distillation.parts = torch.cat([parts, counts.sum()[None]])
    if z_loss is not None:
        share = parts[1] / num_targets.squeeze()
        z_loss.share = share if z_loss.share is None else z_loss.share + share
    return summed / num_targets.squeeze()


def token_losses(weight: Tensor, hidden: Tensor, labels: Tensor, settings: ModelSettings) -> Tensor:
    """Cross entropy per token in nats, float32 (N * B,), tokens outermost; 0 where the label is IGNORED.

    Autograd would keep the logits of all chunks.
    """
    hidden = column_input(hidden, settings).flatten(0, 1)
    targets = labels.transpose(0, 1).reshape(-1)
    chunk_size, vocab_size = settings.loss_chunk_size, settings.local_vocab_size
    scaling, is_parallel = LogitScaling.of(settings.model), settings.mesh.tp.size > 1
    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size))
    return torch.cat([_chunk_losses(weight, *chunk, vocab_size, is_parallel, scaling) for chunk in chunks])


def _chunk_losses(
    weight: Tensor, hidden: Tensor, target: Tensor, vocab_size: int, is_parallel: bool, scaling: LogitScaling
) -> Tensor:
    logits = scaling(F.linear(hidden, weight).float())
    logits[:, vocab_size:] = -math.inf
    if not is_parallel:
        return F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="none")
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    counts = target != IGNORED
    return vocab_parallel_cross_entropy(logits, target.where(counts, 0)).where(counts, 0.0)


class ClassifierHead(nn.Module):
    """Pools each document (or combines a pair of them), then a matrix or MLP maps to the classes.

    Replicated: every tensor rank computes all of it.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        model = settings.model
        assert model.classifier is not None
        self.config = model.classifier
        self.tp = settings.mesh.tp
        self.sharded = settings.mesh.sequence_parallel
        width = model.hidden_size * (4 if self.config.documents == 2 else 1)
        with seeded_by(settings.seed, "head"):
            self.inner = _linear(settings, width, model.hidden_size) if self.config.head == "mlp" else None
            width = width if self.inner is None else model.hidden_size
            self.output = _linear(settings, width, self.config.num_classes)

    def forward(self, layer_inputs: LayerInputs) -> Tensor:
        """This rank's share of the mean cross entropy in nats over the examples of the global batch.

        In evaluation (2,): also its share of the accuracy. Regression: only the mean squared error.
        """
        hidden, positions, labels, num_targets, *_ = layer_inputs
        logits = self.logits(hidden, positions)
        if self.config.num_classes == 1:
            errors = (logits.squeeze(-1) - labels).masked_fill(labels == IGNORED, 0.0)
            return errors.square().sum() / num_targets.squeeze()
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if self.training:
            return loss / num_targets.squeeze()
        # No class has the id IGNORED, so examples that do not count are never correct.
        right = (logits.argmax(-1) == labels).sum()
        return torch.stack([loss, right.to(loss.dtype)]) / num_targets

    def logits(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states (N, B, C) at positions (B, N) -> float32 logits (examples, classes)."""
        documents = self._pooled(hidden, positions).to(self.output.weight.dtype)
        if self.config.documents == 2:
            a, b = documents[0::2], documents[1::2]
            documents = torch.cat([a, b, a * b, a - b], dim=-1)
        if self.inner is not None:
            documents = F.gelu(self.inner(documents))
        return self.output(documents).float()

    def _pooled(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """(B, C) float32: the mean over a sequence's tokens, or the state of its first token."""
        takes = (positions >= 0) if self.config.pooling == "mean" else (positions == 0)
        weights = takes / takes.sum(1, keepdim=True)
        if self.sharded:
            weights = weights.chunk(self.tp.size, dim=1)[self.tp.rank]
        pooled = torch.einsum("bn,nbc->bc", weights, hidden.float())
        if not self.sharded:
            return pooled
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        return reduce_from_tensor_model_parallel_region(pooled, group=self.tp.group)


def _linear(settings: ModelSettings, inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    settings.init_method(outputs)(layer.weight)
    nn.init.zeros_(layer.bias)
    settings.init_bias(layer.bias, inputs, lambda numbers: numbers, outputs)
    return layer
