"""A model whose attention mechanisms learn, layer by layer, to give what a dense teacher's attention gives."""

import math
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor, nn

from megakernel.config import Config
from megakernel.model import LanguageModel, ModelSettings, Pipeline
from megakernel.model.layer import converted_cores
from megakernel.model.layer_inputs import LayerInputs, as_bits, from_bits
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh

from .distilled import Teacher
from .head_statistics import HeadTag
from .transfer import AttentionTransfer


class LayerTransfer:
    """Attention transfer of the layers that this process holds, as one term of the run's loss."""

    def __init__(self, student: nn.Module, teacher: Teacher, config: Config, mesh: Mesh):
        """config: its objective says what is compared, its training how many rows a step has.

        Raises UserError for a layer that cannot be called as the teacher's is.
        """
        self.student, self.teacher, self.mesh = student, teacher, mesh
        self.training = config.training
        objective = config.objective
        self.attention = AttentionTransfer(
            teacher.model,
            converted_cores(student),
            query_rows=objective.rows,
            cross_entropy=objective.cross_entropy if objective.rows else 0.0,
            seed=config.run.seed,
        )

    def __call__(self, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """The states that leave the teacher's layers, and the loss of these layers."""
        with self.attention:
            hidden = self.teacher.hidden(inputs)
        # Each tensor rank has the heads that are its own.
        group = self.mesh.tp.group
        return hidden, reduce_from_tensor_model_parallel_region(self.attention.loss(), group=group)

    def begin_step(self, step: int) -> None:
        """Draw the queries of this step, of as many rows as its phase has in a batch."""
        self.teacher.share(self.student)
        batch_rows = self.training.phase_of(step).training.global_batch_size
        self.attention.begin(step, batch_rows)

    def scalars(self) -> dict[str, float]:
        """Under `HeadTag`s, of all processes' layers: normalized errors, and what sampled queries see."""
        means = self.attention.sums.means(self.mesh.gather_objects)
        self.attention.sums.clear()
        return {
            str(HeadTag(name, layer, head)): value
            for name, layers in means.items()
            for layer, heads in layers.items()
            for head, value in enumerate(heads.tolist())
            if not math.isnan(value)  # of no query, such as those with nothing beyond their window
        }


class _Transferred:
    """What `TransferModel` and `TransferPipeline` are told and tell alike."""

    transfer: LayerTransfer

    def begin_step(self, step: int) -> None:
        """See `LayerTransfer`."""
        self.transfer.begin_step(step)

    def scalars(self) -> dict[str, float]:
        """See `LayerTransfer`."""
        return self.transfer.scalars()


class TransferModel(_Transferred, LanguageModel):
    """In training its loss is that of attention transfer, and it is the teacher that is run; else the model alone."""

    def __init__(self, settings: ModelSettings, config: Config, teacher: Teacher):
        """config, teacher: see `LayerTransfer`."""
        super().__init__(settings)
        assert isinstance(settings.mesh, Mesh)
        self.transfer = LayerTransfer(self, teacher, config, settings.mesh)

    def forward(self, *inputs: Tensor) -> Tensor:
        """As a LanguageModel, but for the loss."""
        if not self.training:
            return super().forward(*inputs)
        return self.transfer(inputs)[1]


class TransferPipeline(_Transferred, Pipeline):
    """The same for a stage: layers learn apart, so each stage's learn while the next ones run the teacher further.

    In training stages hand on (loss so far, the teacher's states as bits, the rest of the inputs). Nothing flows back
    but the gradient of the loss, one number: a stage has its layers' gradients since its forward pass, and what
    DeepSpeed's schedule calls its backward pass is to scale them.
    """

    def __init__(
        self, settings: ModelSettings, loss_scale: Callable[[], float], config: Config, teacher: Teacher
    ):
        """loss_scale: see `Pipeline`. config, teacher: see `LayerTransfer`; the teacher has this stage's layers."""
        super().__init__(settings, loss_scale)
        self.dtype = DTYPES[config.training.dtype]
        self.transfer = LayerTransfer(self, teacher, config, self.mesh)

    def forward(self, inputs: LayerInputs) -> LayerInputs | Tensor:
        """What the stage hands on; of the last one the loss."""
        if not self.training:
            return super().forward(inputs)
        if self.mesh.is_first_stage:
            loss = torch.zeros(1, device=self.mesh.device)
        else:
            # The loss comes first: DeepSpeed receives the n-th gradient where the n-th tensor came in.
            loss, bits, *rest = inputs
            inputs = (from_bits(bits, self.dtype), *rest)
        hidden, own = self.transfer(inputs)
        loss = loss + own
        if self.mesh.is_last_stage:
            return loss.squeeze()
        return (loss, as_bits(hidden), *inputs[1:])
