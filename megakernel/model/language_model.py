"""The model as one list of layers, which becomes a sequential module or a DeepSpeed pipeline."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.compression import share_over_layers
from megakernel.ops.documents import collapse_positions
from megakernel.parallel.axis import OneProcess

from .embedding import LearnedPositions, SinusoidalPositions, TokenEmbedding
from .encoder_decoder import SourceLayer, SourceNorm, TargetLayer, TargetNorm
from .head import ClassifierHead, FinalNorm, OutputHead, mean_loss, token_losses
from .layer import TransformerLayer
from .layer_inputs import LayerInputs
from .linear import column_input
from .self_attention import set_rotary
from .settings import ModelSettings
from .vocabulary_loss import DistillationTarget, LogitScaling

TIED = "embedding"
"""Module name of an embedding that is also the head."""


POSITIONS: dict[str, type[nn.Module]] = {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions}
"""model.position -> layer that follows the embedding; the other kinds have none."""


class LayerSpec(NamedTuple):
    """A layer of the list, which the rank that holds it builds."""

    kind: type[nn.Module]
    arguments: tuple[Any, ...]

    shared: str | None = None
    """Name of a module shared with other layers (tied embeddings); None: not shared."""

    forward: Callable[..., Any] | None = None
    """The layer's function of a shared module and the inputs; None: the module's forward."""

    def build(self, index: int, settings: ModelSettings) -> nn.Module:
        """A new module of this layer, the `index`-th of the list."""
        return built(index, settings, lambda: self.kind(*self.arguments))


def built(index: int, settings: ModelSettings, build: Callable[[], nn.Module]) -> nn.Module:
    """A new layer, of which `settings.start` says where it goes."""
    return build() if settings.start is None else settings.start.build(index, build)


def layer_list(settings: ModelSettings) -> list[LayerSpec]:
    """Embedding, transformer layers, final norm and head; each maps LayerInputs to LayerInputs, the head to the loss.

    In evaluation the head may return more than the loss: see `Model.metric_names`.
    """
    model = settings.model
    arguments = (settings,)
    body = [LayerSpec(TransformerLayer, (settings, index)) for index in range(model.num_layers)]
    norm = LayerSpec(FinalNorm, arguments)
    if model.encoder is not None:
        encoder, layers = model.encoder.num_layers, range(model.all_layers)
        body = [LayerSpec(SourceLayer, (settings, index)) for index in layers[:encoder]]
        body.append(LayerSpec(SourceNorm, arguments))
        body += [LayerSpec(TargetLayer, (settings, index)) for index in layers[encoder:]]
        norm = LayerSpec(TargetNorm, arguments)
    positions = [LayerSpec(POSITIONS[model.position], arguments)] if model.position in POSITIONS else []
    first, last = LayerSpec(TokenEmbedding, arguments), LayerSpec(OutputHead, arguments)
    if model.tie_embeddings:
        first = LayerSpec(TokenEmbedding, arguments, TIED)
        last = first._replace(forward=partial(_tied_loss, settings=settings))
    if model.classifier is not None:  # the embedding keeps its name, so that weights of a language model fit
        last = LayerSpec(ClassifierHead, arguments)
    return [first, *positions, *body, norm, last]


def _tied_loss(
    embedding: TokenEmbedding,
    inputs: LayerInputs,
    distillation: DistillationTarget | None = None,
    *,
    settings: ModelSettings,
) -> Tensor:
    return mean_loss(embedding.tokens.weight, inputs, settings, distillation)


class Layers:
    """The consecutive layers of the list that this rank holds: all, or a part such as a pipeline stage."""

    settings: ModelSettings

    layers: list[Callable[..., Any]]

    has_head: bool
    """Whether the last layer is the head."""

    def body(self, inputs: LayerInputs) -> LayerInputs:
        """Outputs of these layers without the head: hidden states in place of token ids."""
        for layer in self.layers[:-1] if self.has_head else self.layers:
            inputs = layer(inputs)
        return inputs

    def loss(self, inputs: LayerInputs, distillation: DistillationTarget | None = None) -> Tensor:
        """The head's loss for outputs of `body`; see `mean_loss`."""
        loss: Tensor = self.layers[-1](inputs, distillation)
        return loss

    def begin_step(self, step: int) -> None:
        """Called before each training step, as some models' losses depend on it."""
        if self.settings.z_loss is not None:
            self.settings.z_loss.share = None

    def scalars(self) -> dict[str, float]:
        """Metrics of the last step besides the loss, by TensorBoard tag; called on all ranks."""
        z_loss, mesh = self.settings.z_loss, self.settings.mesh
        if z_loss is None:
            return {}
        assert not isinstance(mesh, OneProcess), "a training run has a mesh"
        share = torch.zeros((), device=mesh.device) if z_loss.share is None else z_loss.share.float()
        return {"train/z_loss": mesh.sum(mesh.sum(share, mesh.gradient), mesh.pp).item()}


class LanguageModel(Layers, nn.Module):
    """All layers of the list, or a part of it, run one after the other in this process.

    Parameters have the names that PipelineModule gives the same list (`1.mlp…`, `tied_modules.embedding…`), so that
    checkpoints of both are interchangeable. Methods need the layers that they use: a part without a head has no logits.
    """

    def __init__(self, settings: ModelSettings, part: range | None = None):
        """part: indices in `layer_list`, such as those of `stage_layers`; None: all."""
        super().__init__()
        self.settings = settings
        self.tied_modules = nn.ModuleDict()
        self.layers = []
        specs = layer_list(settings)
        part = part or range(len(specs))
        self.has_head = part.stop == len(specs)
        for index in part:
            self.layers.append(self._build(index, specs[index]))
        set_rotary(self, settings.model)
        share_over_layers(self)

    def _build(self, index: int, spec: LayerSpec) -> Callable[..., Any]:
        if spec.shared is None:
            self.add_module(str(index), spec.build(index, self.settings))
            return self.get_submodule(str(index))
        if spec.shared not in self.tied_modules:
            self.tied_modules[spec.shared] = spec.build(index, self.settings)
        module = self.tied_modules[spec.shared]
        return module if spec.forward is None else partial(spec.forward, module)

    def forward(self, *inputs: Tensor) -> Any:
        """Token ids (B, N), positions, labels, num_targets -> the head's output, in training the loss."""
        outputs: Any = inputs
        for layer in self.layers:
            outputs = layer(outputs)
        return outputs

    def losses(self, *inputs: Tensor) -> Tensor:
        """Cross entropy per token in nats, float32 (B, N); 0 where the label is IGNORED."""
        hidden, _, labels, _ = self.body(inputs)
        return token_losses(self.output_matrix, hidden, labels, self.settings).view(labels.T.shape).T

    def log_probabilities(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Log probabilities of the classes, float32 (examples, classes); classifiers only."""
        return F.log_softmax(self.outputs(tokens, positions), dim=-1)

    def outputs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits, or one number for regression, float32 (examples, classes); classifiers only."""
        head = self.layers[-1]
        assert isinstance(head, ClassifierHead)
        return head.logits(*self.body((tokens, positions)))

    def hidden(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Normalized hidden states (N, B, C), the head's input, of whole sequences (B, N)."""
        return self.body((tokens, positions))[0]

    def extend(self, tokens: Tensor, positions: Tensor, states: list[Any] | None) -> tuple[Tensor, list[Any]]:
        """`hidden` of tokens (B, N) that continue those in `states` (None: start a sequence), and the new states.

        The states of kernelized layers have a constant size; those of softmax layers grow with the tokens. Positions
        may be on the CPU while the tokens are on a GPU: then texts of one length need no masks there.
        """
        old_states: list[Any] = states or [None] * self.settings.model.num_layers
        collapsed = collapse_positions(positions)
        positions = positions.to(tokens.device)
        places = collapsed if isinstance(collapsed, int) else positions
        inputs: LayerInputs = (tokens, positions)
        new_states: list[Any] = []
        for layer in self.layers[:-1]:
            if isinstance(layer, TransformerLayer):
                hidden, state = layer.extend(inputs[0], places, old_states[len(new_states)])
                inputs = (hidden, positions)
                new_states.append(state)
            else:
                inputs = layer(inputs)
        return inputs[0], new_states

    def encode(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The encoder's output (N, B, C) for sources (B, N), which the decoder reads; encoder-decoders only."""
        inputs: LayerInputs = (tokens, positions)
        for layer in self.layers[: self.layers.index(self._source_norm)]:
            inputs = (layer.encode(*inputs), positions) if isinstance(layer, SourceLayer) else layer(inputs)
        return self._source_norm.norm(inputs[0])

    def extend_target(
        self,
        tokens: Tensor,
        position: int,
        states: list[Any] | None,
        sources: Tensor | None = None,
        real: Tensor | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """Normalized hidden states (N, B, C) of target tokens (B, N), and the new states; encoder-decoders only.

        position: of the first of these tokens in all targets. In the first call, without states, sources (S, B, C) is
        what `encode` returned, and real (B, S) marks its tokens that are no padding.
        """
        positions = position + torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        inputs: LayerInputs = (tokens, positions)
        old_states: list[Any] = states or [None] * self.settings.model.num_layers
        new_states: list[Any] = []
        for layer in self.layers[:-1]:
            if isinstance(layer, TargetLayer):
                hidden, state = layer.extend_target(
                    inputs[0], position, sources, real, old_states[len(new_states)]
                )
                new_states.append(state)
                inputs = (hidden, positions)
            elif isinstance(layer, TargetNorm):
                inputs = (layer.norm(inputs[0]), positions)
            elif not isinstance(layer, (SourceLayer, SourceNorm)):
                inputs = layer(inputs)
        return inputs[0], new_states

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (N, B, C) -> logits (B, N, V) of the next tokens."""
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
    def _source_norm(self) -> SourceNorm:
        """The layer behind those of the encoder."""
        return next(layer for layer in self.layers if isinstance(layer, SourceNorm))

    @property
    def output_head(self) -> OutputHead:
        """The last layer, if embeddings are not tied."""
        head = self.layers[-1]
        assert isinstance(head, OutputHead)
        return head

    @property
    def output_matrix(self) -> Tensor:
        """This tensor rank's rows (R / tp, C) of the head, padding included."""
        tied = TIED in self.tied_modules
        return self.token_embedding.tokens.weight if tied else self.output_head.linear.weight


def cast(model: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """Cast the model as DeepSpeed does: all parameters, even those that layers keep in float32 under `Module.to`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(dtype)
