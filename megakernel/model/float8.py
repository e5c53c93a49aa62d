"""Products of float8 numbers in place of bfloat16 (`training.fp8`), by torchao.

A tensor is divided by its largest magnitude, or each of its rows, rounded to float8 (e4m3), and multiplied by the
device's float8 product with sums in float32. That is done anew for each of the three products of a matrix: of the input
in forward, and of the output's gradient with the weights and with the input in backward.
"""

import logging
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megakernel.config import UserError
from megakernel.config.extras import need
from megakernel.config.rules import FLOAT8_UNIT

CAPABILITY = (8, 9)
"""Least compute capability of GPUs with float8 products: Ada; Hopper has 9.0."""

ATTRIBUTE = "float8"
"""Name of the attribute with the `Float8` of a matrix that is multiplied so in training."""


def check_float8(scaling: str, device: torch.device) -> None:
    """Raise UserError if the device has no float8 products, or torchao is missing."""
    need(f"training.fp8={scaling}", "torchao")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            f"training.fp8={scaling} needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}; set training.fp8=none"
        )


def use_float8(matrices: Iterable[nn.Module], scaling: str) -> None:
    """Multiply these linear layers in float8 in training. scaling: see `Float8.of`."""
    for linear in matrices:
        setattr(linear, ATTRIBUTE, Float8.of(scaling))


class Float8(NamedTuple):
    """How x (..., inputs) is multiplied with a transposed weight (outputs, inputs)."""

    multiply: Any
    """torchao's function."""

    settings: tuple[Any, ...]
    """Its last arguments."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """(..., outputs) in the dtype of x; so are both gradients."""
        result: Tensor = self.multiply(x, weight.t(), *self.settings)
        return result

    @staticmethod
    @cache
    def of(scaling: str) -> "Float8":
        """Products with scales of whole tensors (`tensorwise`), or of their rows (`rowwise`)."""
        disabled = logging.root.manager.disable
        logging.disable(logging.WARNING)  # of kernels for other formats that do not fit this build of torch
        try:
            from torchao.float8 import Float8LinearConfig
            from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
        finally:
            logging.disable(disabled)
        config = Float8LinearConfig.from_recipe_name(scaling)
        with torch.device("meta"):
            linear = Float8Linear(FLOAT8_UNIT, FLOAT8_UNIT, bias=False, config=config)
        return Float8(matmul_with_hp_or_float8_args.apply, (linear.linear_mm_config, config))
