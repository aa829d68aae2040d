"""The public result classes and functions, and the modules that define them."""

from .expose import ExposedNeurons
from .gate_option import Calibration
from .two_blocks import HeadStack
from .verification import Verification

__all__ = ["Calibration", "ExposedNeurons", "HeadStack", "Verification"]
