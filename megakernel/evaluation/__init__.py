"""How well a trained model predicts text."""

from .result import Evaluation, PositionBucket
from .run import evaluate_baseline, evaluate_run

__all__ = ["Evaluation", "PositionBucket", "evaluate_baseline", "evaluate_run"]
