"""Plans of runs without GPUs: memory, traffic and time of a step. Importing this package does not import torch."""

from .gpus import ACCURACY, GPUS, RATES, RATES_SOURCE, RATES_TEXT, Gpu
from .layout import CPU, GPU, Job, Layout
from .plan import WAYS, Plan, Planned, Sized, efficiency, plan, scaling
