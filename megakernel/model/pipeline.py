"""The model's list of layers, partitioned into the stages of a DeepSpeed pipeline."""

from collections.abc import Callable

from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced
from torch import Tensor, nn

from megakernel.parallel import Mesh

from .language_model import TIED, LanguageModel, Layers, built, layer_list
from .layer import TransformerLayer
from .settings import ModelSettings


def stage_layers(settings: ModelSettings) -> range:
    """Indices in `layer_list` of this rank's stage.

    Stages have equal numbers of transformer layers; the first also has the embedding, the last the head.
    """
    assert isinstance(settings.mesh, Mesh)
    weights = [int(spec.kind is TransformerLayer) for spec in layer_list(settings)]
    bounds = partition_balanced(weights, settings.mesh.pp.size)
    return range(*bounds[settings.mesh.pp.rank :][:2])


class _Spec(LayerSpec):
    """A layer that DeepSpeed builds as `LanguageModel` does."""

    def placed(self, index: int, settings: ModelSettings) -> "_Spec":
        """Itself, for the `index`-th layer of the list."""
        self._place = index, settings
        return self

    def build(self, log: bool = False) -> nn.Module:
        """A new module of this layer."""
        return built(*self._place, lambda: super(_Spec, self).build(log))


class _TiedSpec(_Spec, TiedLayerSpec):
    """The same for a layer that stages share."""


class Pipeline(Layers, PipelineModule):
    """This rank's stage of the layers, with the parameter names of a `LanguageModel`.

    DeepSpeed calls it with the inputs of the stage; the last stage computes the loss.
    """

    def __init__(self, settings: ModelSettings, loss_scale: Callable[[], float]):
        """loss_scale: factor of the loss that DeepSpeed differentiates."""
        assert isinstance(settings.mesh, Mesh)
        if settings.model.tie_embeddings:
            settings.mesh.build_ends()
        super().__init__(
            [
                (
                    _Spec(kind, *arguments)
                    if shared is None
                    else _TiedSpec(
                        shared, kind, *arguments, forward_fn=forward, tied_weight_attr="tokens.weight"
                    )
                ).placed(index, settings)
                for index, (kind, arguments, shared, forward) in enumerate(layer_list(settings))
            ],
            topology=settings.mesh.topology,
            loss_fn=lambda loss, _: loss * loss_scale(),
            partition_method="type:TransformerLayer",
            # `seeded_by` makes weights functions of (seed, layer); building the model draws nothing else.
            seed_layers=False,
        )
        self.settings = settings
        self.mesh = settings.mesh
        self.layers, self.has_head = self.forward_funcs, self.mesh.is_last_stage
        assert range(self._local_start, self._local_stop) == stage_layers(settings)

    @property
    def output_matrix(self) -> Tensor:
        """This tensor rank's rows (R / tp, C) of the head, padding included; on the last stage."""
        if TIED in self.tied_modules:
            return self.tied_modules[TIED].tokens.weight
        return self.forward_funcs[-1].linear.weight

    def get_tied_weights_and_groups(self) -> list:
        """Tied weights whose gradients DeepSpeed sums over their copies, without frozen ones, which have none."""
        return [
            (weight, group) for weight, group in super().get_tied_weights_and_groups() if weight.requires_grad
        ]


LocalModel = LanguageModel | Pipeline
"""A whole model or this rank's pipeline stage of one."""


def build_model(settings: ModelSettings, loss_scale: Callable[[], float] = lambda: 1.0) -> LocalModel:
    """A `LanguageModel`, or this rank's `Pipeline` stage if the mesh has several stages."""
    mesh = settings.mesh
    if isinstance(mesh, Mesh) and mesh.pp.size > 1:
        return Pipeline(settings, loss_scale)
    return LanguageModel(settings)
