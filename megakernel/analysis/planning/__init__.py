"""What a run needs before any GPU is bought: memory, traffic and time of a step, counted; imports no torch."""

from .gpus import GPUS, Gpu
from .layout import CPU, GPU, Job, Layout
from .plan import Plan, Planned, plan
from .rates import ACCURACY, ASSUMED, Rates
from .scaling import WAYS, Point, efficiency, scaling

__all__ = [
    "ACCURACY",
    "ASSUMED",
    "CPU",
    "GPU",
    "GPUS",
    "WAYS",
    "Gpu",
    "Job",
    "Layout",
    "Plan",
    "Planned",
    "Point",
    "Rates",
    "efficiency",
    "plan",
    "scaling",
]
