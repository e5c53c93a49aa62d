"""How fast attention is, what it holds in memory, and how near that is to what the device could do."""

from .machine import H200
from .measuring import survey
from .page import measured_page, predicted_page
from .suites import SUITES

__all__ = ["H200", "SUITES", "measured_page", "predicted_page", "survey"]
