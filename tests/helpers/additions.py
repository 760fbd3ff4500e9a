"""Muon's additions to the paper's step, alone and together."""

from __future__ import annotations

from typing import Any

ADDITIONS: dict[str, dict[str, Any]] = {
    "polar express": {"orthogonalizer": "polar_express"},
    "polar express, seven steps": {"orthogonalizer": "polar_express", "ns_steps": 7},
    "equal rows": {"equilibrate": "rows"},
    "equal columns": {"equilibrate": "columns"},
    "renormalized rows": {"renormalize": "rows"},
    "renormalized columns": {"renormalize": "columns"},
    "renormalized matrix": {"renormalize": "matrix"},
    "moments of rows": {"normuon": "rows"},
    "moments of columns": {"normuon": "columns", "normuon_beta": 0.5},
    "moments of the longer side": {"normuon": "longer", "normuon_beta": 0.9},
    "weight decay": {"weight_decay": 0.3},
    "cautious weight decay": {"weight_decay": 0.3, "cautious": True},
    "all of nanochat's": {
        "orthogonalizer": "polar_express",
        "equilibrate": "rows",
        "renormalize": "matrix",
        "normuon": "longer",
        "normuon_beta": 0.9,
        "weight_decay": 0.28,
        "cautious": True,
    },
}
