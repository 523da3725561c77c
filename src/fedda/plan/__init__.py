"""What an experiment would take on more devices, and with more clients, than are here; `fedda plan` prints it."""

from .link import Link, measured_link
from .measure import measured
from .predict import Size, predict, worlds
from .profile import Method, Profile

__all__ = ["Link", "Method", "Profile", "Size", "measured", "measured_link", "predict", "worlds"]
