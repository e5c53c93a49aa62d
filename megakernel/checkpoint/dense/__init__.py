"""Dense checkpoints as Hugging Face's `transformers` writes them: what they are, and their tensors under our names."""

from .checkpoint import DenseCheckpoint, is_dense_checkpoint
from .families import FAMILIES, model_section

__all__ = ["FAMILIES", "DenseCheckpoint", "is_dense_checkpoint", "model_section"]
