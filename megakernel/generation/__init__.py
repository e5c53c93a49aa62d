"""Text from a trained model, token by token from a recurrent state."""

from .decoding import Sampling
from .run import Samples, check_positions, continued, generate_texts

__all__ = ["Samples", "Sampling", "check_positions", "continued", "generate_texts"]
