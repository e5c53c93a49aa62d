"""The model as ONE list of layers, which becomes either a sequential module or a DeepSpeed pipeline."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.ops.documents import alike

from .embedding import LearnedPositions, SinusoidalPositions, TokenEmbedding
from .head import ClassifierHead, FinalNorm, OutputHead, mean_loss, token_losses
from .layer import TransformerLayer
from .layer_inputs import LayerInputs
from .linear import column_input
from .self_attention import rotate_by
from .settings import ModelSettings
from .vocabulary_loss import DistillationTarget, LogitScaling

TIED = "embedding"
"""Name of the embedding that is also the head."""


POSITIONS: dict[str, type[nn.Module]] = {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions}
"""Layers behind the embedding, by model.position; other kinds of positions have none."""


class LayerSpec(NamedTuple):
    """A layer of the list, to be built by whoever holds it."""

    kind: type[nn.Module]
    arguments: tuple[Any, ...]

    shared: str | None = None
    """Name of the module that layers of this name share; None: it is the layer's own."""

    forward: Callable[..., Any] | None = None
    """What the layer does with a shared module; None: the module's own forward."""

    def build(self) -> nn.Module:
        """Its module."""
        return self.kind(*self.arguments)


def layer_list(settings: ModelSettings) -> list[LayerSpec]:
    """Embedding, transformer layers, final norm, head; each maps activations to activations, the head to the loss.

    Outside training the head may measure more than the loss: see `Model.measures`.
    """
    model = settings.model
    body = [LayerSpec(TransformerLayer, (settings, index)) for index in range(model.num_layers)]
    alone = (settings,)
    positions = [LayerSpec(POSITIONS[model.position], alone)] if model.position in POSITIONS else []
    first, last = LayerSpec(TokenEmbedding, alone), LayerSpec(OutputHead, alone)
    if model.tie_embeddings:
        first = LayerSpec(TokenEmbedding, alone, TIED)
        last = first._replace(forward=partial(_tied_loss, settings=settings))
    if model.classifier is not None:  # its embedding keeps the name it has in a language model
        last = LayerSpec(ClassifierHead, alone)
    return [first, *positions, *body, LayerSpec(FinalNorm, alone), last]


def _tied_loss(
    embedding: TokenEmbedding,
    inputs: LayerInputs,
    distillation: DistillationTarget | None = None,
    *,
    settings: ModelSettings,
) -> Tensor:
    return mean_loss(embedding.tokens.weight, inputs, settings, distillation)


class Layers:
    """What a process holds of the list, to run one after the other: all of it, or a part such as a pipeline's stage."""

    layers: list[Callable[..., Any]]

    has_head: bool
    """Whether the last of them is the head."""

    def body(self, inputs: LayerInputs) -> LayerInputs:
        """The inputs as they leave these layers, or enter the head: normalized hidden states in place of token ids."""
        for layer in self.layers[:-1] if self.has_head else self.layers:
            inputs = layer(inputs)
        return inputs

    def loss(self, inputs: LayerInputs, distillation: DistillationTarget | None = None) -> Tensor:
        """The head's loss of inputs from `body`; see `mean_loss`."""
        loss: Tensor = self.layers[-1](inputs, distillation)
        return loss

    def begin_step(self, step: int) -> None:
        """Told before each training step; for models whose loss depends on it."""

    def scalars(self) -> dict[str, float]:
        """What there is to tell besides the loss, by TensorBoard tag, since the last call; called on all ranks."""
        return {}


class LanguageModel(Layers, nn.Module):
    """The layers one after the other in this process: all of them, or a part of the list.

    Parameters carry the names that PipelineModule gives the same list (`1.mlp…`, `tied_modules.embedding…`), so that
    a checkpoint of one becomes a checkpoint of the other. A part maps the inputs that enter it to those that leave it,
    and what else a model can be asked for needs the layers that answer.
    """

    def __init__(self, settings: ModelSettings, part: range | None = None):
        """part: places in `layer_list`, such as `stage_layers` names; None: all."""
        super().__init__()
        self.settings = settings
        self.tied_modules = nn.ModuleDict()
        self.layers = []
        specs = layer_list(settings)
        part = part or range(len(specs))
        self.has_head = part.stop == len(specs)
        for index in part:
            self.layers.append(self._build(index, specs[index]))
        rotate_by(self, settings.model)

    def _build(self, index: int, spec: LayerSpec) -> Callable[..., Any]:
        if spec.shared is None:
            self.add_module(str(index), spec.build())
            return self.get_submodule(str(index))
        if spec.shared not in self.tied_modules:
            self.tied_modules[spec.shared] = spec.build()
        module = self.tied_modules[spec.shared]
        return module if spec.forward is None else partial(spec.forward, module)

    def forward(self, *inputs: Tensor) -> Any:
        """Token ids (B, N), positions, labels and num_targets -> what the head makes of them, in training the loss."""
        inputs = self.body(inputs)
        return self.layers[-1](inputs) if self.has_head else inputs

    def losses(self, *inputs: Tensor) -> Tensor:
        """The cross entropy of each token in nats, float32 (B, N); 0 where the label is IGNORED."""
        hidden, _, labels, _ = self.body(inputs)
        return token_losses(self.output_matrix, hidden, labels, self.settings).view(labels.T.shape).T

    def log_probabilities(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Of the classes of each example, float32 (examples, classes); classifiers only."""
        return F.log_softmax(self.outputs(tokens, positions), dim=-1)

    def outputs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the head makes of each example, float32 (examples, classes): logits, or one number; classifiers only."""
        head = self.layers[-1]
        assert isinstance(head, ClassifierHead)
        return head.logits(*self.body((tokens, positions)))

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """What the head reads, (N, B, C), of whole sequences (B, N)."""
        return self.body((tokens, positions))[0]

    def extend(self, tokens: Tensor, positions: Tensor, states: list[Any] | None) -> tuple[Tensor, list[Any]]:
        """`hidden` of tokens (B, N) that follow those in `states` (None: the beginning), and the new states.

        The states' size does not grow with the number of tokens for kernelized layers; a softmax layer keeps its keys.
        """
        entering: list[Any] = states or [None] * self.settings.model.num_layers
        inputs: LayerInputs = (tokens, positions)
        leaving: list[Any] = []
        places = alike(positions)
        for layer in self.layers[:-1]:
            if isinstance(layer, TransformerLayer):
                hidden, state = layer.extend(inputs[0], places, entering[len(leaving)])
                inputs = (hidden, positions)
                leaving.append(state)
            else:
                inputs = layer(inputs)
        return inputs[0], leaving

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (N, B, C) -> logits (B, N, V) of the next ids."""
        rows = column_input(hidden, self.settings).transpose(0, 1)
        logits = LogitScaling.of(self.settings.model)(F.linear(rows, self.output_matrix))
        if self.settings.mesh.tp.size > 1:
            from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

            logits = gather_from_tensor_model_parallel_region(logits, group=self.settings.mesh.tp.group)
        return logits[..., : self.settings.vocab_size]

    @property
    def token_embedding(self) -> TokenEmbedding:
        """The first layer."""
        first = self.tied_modules[TIED] if TIED in self.tied_modules else self.get_submodule("0")
        assert isinstance(first, TokenEmbedding)
        return first

    @property
    def output_head(self) -> OutputHead:
        """The last layer, where embeddings are not tied."""
        head = self.layers[-1]
        assert isinstance(head, OutputHead)
        return head

    @property
    def output_matrix(self) -> Tensor:
        """This tensor rank's rows (R / tp, C) of the head, padding included."""
        tied = TIED in self.tied_modules
        return self.token_embedding.tokens.weight if tied else self.output_head.linear.weight


def cast(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """The model as DeepSpeed casts it for training: all parameters, also those that a half-precision layer keeps."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(dtype)
