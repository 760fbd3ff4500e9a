"""Text generation with a trained model."""

from .capture import Generated, generate_captured
from .engine import Request, Step, TokenRouting, generate
from .show import LEGEND, printable, render_routing

__all__ = [
    "LEGEND",
    "Generated",
    "Request",
    "Step",
    "TokenRouting",
    "generate",
    "generate_captured",
    "printable",
    "render_routing",
]
