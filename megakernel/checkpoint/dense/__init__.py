"""Dense checkpoints in the form of Hugging Face's `transformers`, and their tensors under our names."""

from .checkpoint import DenseCheckpoint, is_dense_checkpoint
from .families import FAMILIES, model_section

__all__ = ["FAMILIES", "DenseCheckpoint", "is_dense_checkpoint", "model_section"]
