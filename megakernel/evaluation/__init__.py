"""Evaluation of a trained model: how well it predicts text, and what it retrieves from its context."""

from .records import not_drawn, record, send
from .result import Evaluation, PositionBucket
from .run import evaluate_run, evaluate_tasks
from .subject import TaskResult
