"""The dtypes that a configuration names."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the name in training.dtype."""
