"""Figures: one file per group, with the data, the drawing and the sentence of each figure.

A figure of `et analyze` is a `Study` in the list `FIGURES` of its file. The figures of a single run's report are in
`training.py`. Only drawing needs matplotlib; importing does not.
"""

from __future__ import annotations

from . import activation, consistency, cutoffs, learning, load, scores, specialisation

SECTIONS = {
    "Learning": learning.FIGURES,
    "Cutoffs": [*scores.FIGURES, *cutoffs.FIGURES],
    "Dynamic computation": activation.FIGURES,
    "Specialisation": specialisation.FIGURES,
    "Routing consistency": consistency.FIGURES,
    "Load": load.FIGURES,
}
FIGURES = [study for studies in SECTIONS.values() for study in studies]
"""The figures of `et analyze`, in the order of its page."""
