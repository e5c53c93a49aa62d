"""Text generation with a trained model, token by token from recurrent states."""

from .engine import GenerationEngine, TextRequest, check_positions
from .run import Samples, TextPiece, continue_texts, generate_texts
from .sampling import Sampling

__all__ = [
    "GenerationEngine",
    "Samples",
    "Sampling",
    "TextPiece",
    "TextRequest",
    "check_positions",
    "continue_texts",
    "generate_texts",
]
