"""Text from a trained model, token by token from recurrent states."""

from .engine import Engine, Request, check_positions
from .run import Piece, Samples, generate_texts
from .sampling import Sampling

__all__ = ["Engine", "Piece", "Request", "Samples", "Sampling", "check_positions", "generate_texts"]
