"""A figure of `et analyze`: its data, its drawing and its sentence under one name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, NamedTuple

from ..material import Material
from ..plain import Data, NotShownError
from ..records import Run
from .style import Figure


class Study(NamedTuple):
    """A figure. `compute` returns its data, or raises NotShownError if it does not apply; `draw` and `say` use it."""

    name: str  # base name of its files
    title: str
    compute: Callable[[Material], Data]
    draw: Callable[..., Figure]
    say: Callable[[Data], str]


def over_methods(runs: Iterable[Run], compute: Callable[[Run], Data]) -> dict[str, Any]:
    """Compute the data of each method. A NotShownError omits the method, or the figure if no method remains."""
    methods: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for run in runs:
        try:
            methods.append({**run.tag, **compute(run)})
        except NotShownError as reason:
            left_out[run.method] = str(reason)
    if not methods:
        raise NotShownError(next(iter(left_out.values())))
    return {"methods": methods, "left_out": left_out}


def of_each_method(compute: Callable[[Material, Run], Data]) -> Callable[[Material], dict[str, Any]]:
    """Turn a function of one run into the `compute` of a figure, for all methods with routed experts."""

    @wraps(compute)
    def of_all(material: Material) -> dict[str, Any]:
        runs = material.each(compute.__name__.replace("_", " "), material.routed)
        return over_methods(runs, partial(compute, material))

    return of_all
