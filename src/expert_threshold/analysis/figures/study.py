"""A figure of `et analyze`: its data, its drawing and its sentence under one name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..material import Material
from ..plain import Data

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Study(NamedTuple):
    """A figure. `compute` raises NotShownError where the figure does not apply; the others take its data."""

    name: str  # base name of its files
    section: str
    title: str
    compute: Callable[[Material], Data]
    draw: Callable[..., Figure]
    say: Callable[[Data], str]
