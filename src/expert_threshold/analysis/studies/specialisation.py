"""Which experts serve which domain, and what single tokens of a passage get (paper, Expert Specialization)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..material import DOMAINS, Material
from ..measures import expert_token_ratio, mutual_information
from ..plain import Data, array
from ..sentences import counted, listed, percent

CELLS = 108
"""Tokens of a passage that is shown in cells: two rows on a wide page."""


def specialisation(material: Material) -> Data:
    """The share of each domain's tokens that each expert gets, per layer: code (HumanEval) and math (GSM8K).

    bits: what the expert of a routed token tells of its domain, per layer, when both have equally many tokens.
    """
    methods = []
    for subject in material.each("expert specialisation", material.routed):
        ratios = {}
        for domain in DOMAINS:
            trace = material.trace(subject, domain)
            ratios[domain] = torch.cat([expert_token_ratio(trace.assignment(layer)[None]) for layer in trace.layers])
        bits = mutual_information(torch.stack(list(ratios.values()), dim=1))
        methods.append({**subject.tag, "layers": subject.layers, "ratios": ratios, "bits": bits})
    return {"domains": DOMAINS, "methods": methods}


def say_specialisation(data: Data) -> str:
    bits = [f"{entry['method']} {array(entry['bits']).mean():.3f}" for entry in data["methods"]]
    most = max(array(list(entry["ratios"].values())).max() for entry in data["methods"])
    return (
        "The expert of a routed token reveals its domain, code (HumanEval) or math (GSM8K), by so many bits, averaged "
        f"over layers and at most 1: {listed(bits)}. "
        f"The darkest cell is an expert that gets {percent(most)} of a domain's tokens."
    )


def specialisation_summary(material: Material) -> Data:
    """The bits of `specialisation` per layer."""
    found = specialisation(material)
    keep = ("method", "kind", "layers", "bits")
    return {"methods": [{name: entry[name] for name in keep} for entry in found["methods"]]}


def say_specialisation_summary(data: Data) -> str:
    ends = [(max(array(entry["bits"])), entry) for entry in data["methods"]]
    most, entry = max(ends, key=lambda end: end[0])
    layer = entry["layers"][int(array(entry["bits"]).argmax())]
    return f"Experts are most specialised in layer {layer} of {entry['method']}, at {most:.3f} bits."


def passage_intensity(material: Material) -> Data:
    """Passages, each token with its routed experts of all layers together."""
    return _passages(material, lambda assignment: assignment.sum(axis=(0, 2)))


def say_passage_intensity(data: Data) -> str:
    parts = []
    for passage in data["passages"]:
        fanout = array(passage["values"])
        order = sorted(range(len(fanout)), key=lambda place: -fanout[place])
        words = [f"“{passage['tokens'][place].strip()}”" for place in order if passage["tokens"][place].strip()]
        top = list(dict.fromkeys(words))[:5]
        parts.append(
            f"{fanout.mean():.1f} on average in {passage['name']}, with a maximum of {fanout.max():.0f}, and highest "
            f"for {listed(top)}"
        )
    layers = counted(len(data["layers"]), "layer")
    return f"In {data['method']} the fanout of a token, summed over {layers}, is {'; '.join(parts)}."


def passage_fanout(material: Material) -> Data:
    """Passages, each token with its routed experts of every layer: (layers, tokens)."""
    return _passages(material, lambda assignment: assignment.sum(axis=2), CELLS)


def say_passage_fanout(data: Data) -> str:
    parts = []
    for passage in data["passages"]:
        means = array(passage["values"]).mean(1)
        text = f"{means.mean():.2f} in {passage['name']}"
        if len(means) > 1:
            low, high = (data["layers"][int(place)] for place in (means.argmin(), means.argmax()))
            text += f" ({means.min():.2f} in layer {low} to {means.max():.2f} in layer {high})"
        parts.append(text)
    return f"A token of {data['method']} has a mean fanout in a layer of {listed(parts)}."


def passage_routing(material: Material) -> Data:
    """Passages, each token with the experts of every layer that it was routed to: (layers, tokens, experts), 0 or 1."""
    return _passages(material, lambda assignment: assignment.astype(int), CELLS)


def say_passage_routing(data: Data) -> str:
    parts = []
    for passage in data["passages"]:
        used = array(passage["values"]).any(axis=1)
        parts.append(f"{used.sum():.0f} of {used.size} experts get a token of {passage['name']}")
    return f"Black cells are tokens routed to an expert of {data['method']}: {listed(parts)}."


def _passages(
    material: Material, measure: Callable[[np.ndarray], np.ndarray], most: int | None = None
) -> dict[str, Any]:
    """What is measured of the assignment (layers, tokens, experts) of each passage, in the run that is in focus.

    most: tokens of its beginning; None is all that was traced.
    """
    subject = material.focus
    passages = []
    for name, (trace, tokens) in material.passages(subject).items():
        # Without the first token, which opens every document and is no text.
        shown = slice(1, None if most is None else most + 1)
        assignment = np.stack([trace.assignment(layer)[shown].numpy() for layer in trace.layers])
        passages.append({"name": name, "tokens": tokens[shown], "values": measure(assignment)})
    experts = subject.run.rule["num_experts"]
    return {**subject.tag, "layers": subject.layers, "experts": experts, "passages": passages}
