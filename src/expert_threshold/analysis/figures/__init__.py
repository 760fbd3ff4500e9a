"""Figures: a file for each group, in which a figure's numbers, its drawing and its sentence stand together.

A figure of `et analyze` is a `Study` in the `FIGURES` of its group's file; those of a single run's report are in
`training.py`. Importing this needs no matplotlib, only drawing does.
"""

from __future__ import annotations

from . import activation, consistency, cutoffs, learning, load, scores, specialisation

GROUPS = (learning, scores, cutoffs, activation, specialisation, consistency, load)
FIGURES = [study for group in GROUPS for study in group.FIGURES]
"""The figures of `et analyze`, in the order of its page."""
