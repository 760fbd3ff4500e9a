"""Text generation with a trained model."""

from .engine import Step, TokenRouting, generate
from .show import LEGEND, printable, render_routing

__all__ = ["LEGEND", "Step", "TokenRouting", "generate", "printable", "render_routing"]
