"""Mixture-of-experts language models with Expert Threshold routing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import GPT, GPTConfig
    from .moe import MoE, follow
    from .routing import ExpertChoice, ExpertThreshold, NullSlots, QuantileBalancing, ReLU, SeqTopK, TokenChoice, TopP

__version__ = "0.1.0"
__all__ = [
    "GPT",
    "ExpertChoice",
    "ExpertThreshold",
    "GPTConfig",
    "MoE",
    "NullSlots",
    "QuantileBalancing",
    "ReLU",
    "SeqTopK",
    "TokenChoice",
    "TopP",
    "follow",
]

_HOMES = {
    "GPT": "model",
    "GPTConfig": "model",
    "MoE": "moe",
    "follow": "moe",
}


def __getattr__(name: str) -> Any:
    """Import a name on first access, so that importing the package alone does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES.get(name, 'routing')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
