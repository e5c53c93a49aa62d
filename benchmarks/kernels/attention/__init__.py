"""Speed and memory of attention, and how close they come to the device's limits.

The command is `python -m benchmarks.kernels.attention`.
"""

from .measuring import run_suite
from .page import measured_page
from .suites import SUITES

__all__ = ["SUITES", "measured_page", "run_suite"]
