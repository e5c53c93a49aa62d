"""The loss of a model whose attention learns, layer by layer, to give what a dense teacher's attention gives."""

import math

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megakernel.config import Config
from megakernel.model import Parted
from megakernel.model.layer import converted_cores
from megakernel.model.layer_inputs import LayerInputs, as_bits, from_bits
from megakernel.model.settings import DTYPES
from megakernel.parallel import Mesh

from .distilled import Teacher
from .head_statistics import HeadTag
from .transfer import AttentionTransfer, check_parts_around


class LayerTransfer:
    """Attention transfer of the layers that this process holds, as one term of the run's loss.

    It is the teacher that is run. Layers learn apart, so each stage's learn while the next ones run it further.
    """

    def __init__(self, student: Parted, teacher: Teacher, config: Config, mesh: Mesh):
        """config: its objective says what is compared, its training how many sequences a step has.

        Raises UserError for a layer that cannot be called as the teacher's is, or has something else around it.
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
        """What a stage hands on: the loss so far, the teacher's states as bits, the rest of the inputs.

        Of the last one the loss. Nothing flows back but its gradient, one number: a stage has its layers' gradients
        since its forward pass, and what DeepSpeed's schedule calls its backward pass is to scale them.
        """
        if self.mesh.is_first_stage:
            before = torch.zeros(1, device=self.mesh.device)
        else:
            # The loss comes first: DeepSpeed receives the n-th gradient where the n-th tensor came in.
            before, bits, *rest = inputs
            inputs = (from_bits(bits, self.dtype), *rest)
        with self.attention:
            hidden = self.teacher.hidden(inputs)
        # Each tensor rank has the heads that are its own.
        own = reduce_from_tensor_model_parallel_region(self.attention.loss(), group=self.mesh.tp.group)
        loss = before + own
        if self.mesh.is_last_stage:
            return loss.squeeze()
        return (loss, as_bits(hidden), *inputs[1:])

    def begin_step(self, step: int) -> None:
        """Draw the queries of this step, of as many sequences as its phase has in a batch."""
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
