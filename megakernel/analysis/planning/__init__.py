"""Plans of runs without GPUs: memory and traffic of a step. Importing this package does not import torch."""

from .gpus import ACCURACY, GPUS, Gpu
from .layout import CPU, GPU, Layout, PlannedJob
from .plan import WAYS, Plan, Planned, plan, scaling
