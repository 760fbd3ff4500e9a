"""Generates text and captures its routing, so that training can repeat the routing with `replay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..data import Tokenizer
from ..model import GPT
from ..moe import Capture, routing_version
from .engine import Engine, Request


class Generated(NamedTuple):
    text: str  # the generated text, without the prompt
    capture: Capture  # the routing of both the prompt and the text


def generate_captured(
    model: GPT, tokenizer: Tokenizer, requests: Sequence[Request], *, slots: int = 8
) -> list[Generated]:
    """Generate a text for each request, up to `slots` at a time, and return the texts with their routing.

    Raises ValueError if a request is invalid or a logit is not finite.
    """
    engine = Engine(model, tokenizer, slots=slots)
    active = [engine.add(request._replace(record=True, echo=True)) for request in requests]
    while engine.busy:
        engine.step()
    found = []
    for writing in active:
        if writing.error is not None:
            raise ValueError(writing.error)
        routings = [step.routing for step in writing.steps if step.routing is not None]
        scores = torch.tensor([[layer.scores for layer in routing] for routing in routings]).transpose(0, 1)
        assignment, gates = torch.zeros_like(scores, dtype=torch.bool), torch.zeros_like(scores)
        for time, routing in enumerate(routings):
            for layer, (_, experts, own) in enumerate(routing):
                assignment[layer, time, experts] = True
                gates[layer, time, experts] = torch.tensor(own)
        tokens = torch.tensor([step.token for step in writing.steps])
        version = routing_version(model, writing.request.rate)
        capture = Capture(tokens, scores.contiguous(), assignment, gates, version)
        found.append(Generated("".join(step.text for step in writing.steps if not step.echoed), capture))
    return found
