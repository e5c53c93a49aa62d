"""Text from a trained model, token by token from a recurrent state."""

from .run import generate_text
from .sampling import Sampling

__all__ = ["Sampling", "generate_text"]
