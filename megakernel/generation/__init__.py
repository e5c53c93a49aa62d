"""Text from a trained model, token by token from a recurrent state."""

from .run import Samples, check_positions, continued, generate_text, generate_texts
from .sampling import Sampling

__all__ = ["Samples", "Sampling", "check_positions", "continued", "generate_text", "generate_texts"]
