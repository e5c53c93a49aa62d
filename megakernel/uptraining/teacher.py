"""A frozen model that another learns from."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import LayerInputs


@dataclass(eq=False)
class Teacher:
    """A frozen language model beside its student; no module, so neither optimizers nor checkpoints find it."""

    model: LanguageModel
    """From `frozen_model`; of a pipeline the layers of this stage."""

    _shares: bool = field(default=False, init=False)

    @torch.no_grad()
    def hidden(self, inputs: LayerInputs) -> Tensor:
        """States (N, B, C) before its head, of the tokens of inputs; of a stage, from what enters to what leaves."""
        return self.model.body(inputs)[0]

    @property
    def output_matrix(self) -> Tensor:
        """This tensor rank's rows (R / tp, C) of its head, padding included."""
        return self.model.output_matrix

    def share(self, student: nn.Module) -> None:
        """Use the student's tensor for every weight that it never updates and that is equal, from the first call on.

        Called before each training step: by the first of a start the student has its weights, new or continued.
        """
        if self._shares:
            return
        self._shares = True
        theirs = dict(student.named_parameters())
        for name, own in self.model.named_parameters():
            other = theirs.get(name)
            if other is None or other.requires_grad or other.dtype != own.dtype:
                continue
            if other.data_ptr() != own.data_ptr() and torch.equal(own, other):
                own.data = other.data
