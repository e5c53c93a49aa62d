"""A model whose attention mechanisms learn, layer by layer, to give what a dense teacher's attention gives."""

import math

from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from megakernel.config import Config
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import Mesh

from .head_tag import HeadTag
from .layers import converted_cores
from .teacher import Teacher
from .transfer import AttentionTransfer


class TransferModel(LanguageModel):
    """In training its loss is that of attention transfer, and it is the teacher that is run; else the model alone."""

    def __init__(self, settings: ModelSettings, config: Config, teacher: Teacher):
        """config: its objective says what is compared, its training how many rows a step has."""
        super().__init__(settings)
        assert isinstance(settings.mesh, Mesh)
        self.mesh = settings.mesh
        self.teacher = teacher
        self.rows_per_step = config.training.global_batch_size
        objective = config.objective
        self.transfer = AttentionTransfer(
            teacher.model,
            converted_cores(self),
            query_rows=objective.rows,
            cross_entropy=objective.cross_entropy if objective.rows else 0.0,
            seed=config.run.seed,
        )
        self._shared = False

    def forward(self, *stream: Tensor) -> Tensor:
        """As a LanguageModel, but for the loss."""
        if not self.training:
            return super().forward(*stream)
        if not self._shared:  # now both have their weights
            self.teacher.share(self)
            self._shared = True
        with self.transfer:
            self.teacher.hidden(stream)
        # Each tensor rank has the heads that are its own.
        group = self.mesh.tp.group
        return reduce_from_tensor_model_parallel_region(self.transfer.loss(), group=group)

    def begin_step(self, step: int) -> None:
        """Draw the queries of this step."""
        self.transfer.begin(step, self.rows_per_step)

    def scalars(self) -> dict[str, float]:
        """Under `HeadTag`s: the normalized error of each head, and what sampled queries see."""
        means = self.transfer.sums.means(self.mesh.gather_objects)
        self.transfer.sums.clear()
        return {
            str(HeadTag(name, layer, head)): value
            for name, layers in means.items()
            for layer, heads in layers.items()
            for head, value in enumerate(heads.tolist())
            if not math.isnan(value)  # of no query, such as those with nothing beyond their window
        }
