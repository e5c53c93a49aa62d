"""What a run needs before any GPU is bought: memory, traffic and time of a step, counted; imports no torch."""

from .gpus import ACCURACY, GPUS, RATES, RATES_SOURCE, RATES_TEXT, Gpu
from .layout import CPU, GPU, Job, Layout
from .plan import WAYS, Plan, Planned, Sized, efficiency, plan, scaling
