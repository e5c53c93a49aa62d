"""Attention transfer as the training objective of a model or pipeline stage."""

import math

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megakernel.config import Config
from megakernel.model import LocalModel
from megakernel.model.layer import converted_cores
from megakernel.model.layer_inputs import LayerInputs, as_bytes
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh

from .distillation import Teacher
from .head_statistics import HeadTag
from .transfer import AttentionTransfer, check_parts_around


class LayerTransfer:
    """Attention transfer of this process's layers, as one term of the run's loss.

    Only the teacher is run through the pipeline; each stage trains its layers while later stages run the teacher.
    """

    def __init__(self, student: LocalModel, teacher: Teacher, config: Config, mesh: Mesh):
        """config: its objective section has the options, its training section the number of sequences per step.

        Raises UserError for a layer that cannot be called like the teacher's, or has other parts around its attention.
        """
        self.student, self.teacher, self.mesh = student, teacher, mesh
        self.training, self.dtype = config.training, DTYPES[config.training.dtype]
        check_parts_around(config.model, teacher.model.settings.model, transfers=True)
        objective = config.objective
        self.attention = AttentionTransfer(
            teacher.model,
            converted_cores(student),
            sampled_queries=objective.rows,
            cross_entropy=objective.cross_entropy if objective.rows else 0.0,
            seed=config.run.seed,
        )

    def __call__(self, inputs: LayerInputs) -> LayerInputs | Tensor:
        """Outputs of a stage: the loss so far, the teacher's states as bytes, the other inputs; on the last the loss.

        The backward pass only sends the loss's scalar gradient: a stage has computed its layers' gradients in its
        forward pass, and its backward pass in DeepSpeed's schedule scales them.
        """
        if self.mesh.is_first_stage:
            before = torch.zeros(1, device=self.mesh.device)
        else:
            # The loss comes first, because DeepSpeed assigns the n-th received gradient to the n-th tensor.
            before, data, *rest = inputs
            inputs = (data.view(self.dtype), *rest)
        with self.attention:
            hidden = self.teacher.hidden(inputs)
        # Each tensor rank has only the loss of its own heads.
        local = reduce_from_tensor_model_parallel_region(self.attention.loss(), group=self.mesh.tp.group)
        loss = before + local
        if self.mesh.is_last_stage:
            return loss.squeeze()
        return (loss, as_bytes(hidden), *inputs[1:])

    def begin_step(self, step: int) -> None:
        """Begin a step of attention transfer, with the batch size of its phase."""
        self.teacher.share_weights(self.student)
        batch_rows = self.training.phase_of(step).training.global_batch_size
        self.attention.begin(step, batch_rows)

    def scalars(self) -> dict[str, float]:
        """Normalized errors and statistics of sampled queries by `HeadTag`, of the layers of all processes."""
        means = self.attention.sums.means(self.mesh.gather_objects)
        self.attention.sums.clear()
        return {
            str(HeadTag(name, layer, head)): value
            for name, layers in means.items()
            for layer, heads in layers.items()
            for head, value in enumerate(heads.tolist())
            if not math.isnan(value)  # no query counted, for example none with keys beyond its window
        }
