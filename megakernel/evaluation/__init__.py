"""How well a trained model predicts text, and what it finds in its context."""

from .records import record
from .result import Evaluation, PositionBucket
from .run import evaluate_baseline, evaluate_run, evaluate_tasks
from .subject import Result
