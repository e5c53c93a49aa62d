"""How fast attention is, what it holds in memory, and how near that is to what the device could do.

`megakernel dev bench attention` in a checkout.
"""

from .measuring import survey
from .page import measured_page
from .suites import SUITES

__all__ = ["SUITES", "measured_page", "survey"]
