"""Text from a trained model."""

from .engine import Step, TokenRouting, generate
from .show import LEGEND, render_routing

__all__ = ["LEGEND", "Step", "TokenRouting", "generate", "render_routing"]
