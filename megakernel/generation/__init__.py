"""Text generation with a trained model, token by token from recurrent states."""

from megakernel.config.decoding import Beams

from .engine import GenerationEngine, TextRequest, check_positions
from .run import Samples, TextPiece, continue_texts, generate_texts
from .sampling import Sampling
from .translation import TranslatedText, translate_sources, translate_texts

__all__ = [
    "Beams",
    "GenerationEngine",
    "Samples",
    "Sampling",
    "TextPiece",
    "TextRequest",
    "TranslatedText",
    "check_positions",
    "continue_texts",
    "generate_texts",
    "translate_sources",
    "translate_texts",
]
