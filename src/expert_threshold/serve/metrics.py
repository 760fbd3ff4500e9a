"""Metrics of a server in Prometheus's text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .worker import Worker


class Metrics:
    def __init__(self, worker: Worker) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self._worker = worker

    def text(self) -> str:
        worker, counts = self._worker, self._worker.engine.counts
        requests = {f'path="{path}",status="{status}"': n for (path, status), n in sorted(self.requests.items())}
        fanout = counts.assignments / counts.routed if counts.routed else 0.0
        metrics = [
            _metric("requests_total", "Requests answered.", requests),
            _metric("prompt_tokens_total", "Prompt tokens read.", counts.read),
            _metric("completion_tokens_total", "Tokens generated.", counts.written),
            _metric("slots", "Texts that can be generated at once.", worker.slots),
            _metric("texts_running", "Texts being generated.", worker.running),
            _metric("texts_waiting", "Texts waiting for a slot.", worker.waiting),
            _metric("routed_tokens_total", "Tokens routed, counted once per MoE layer.", counts.routed),
            _metric("assignments_total", "Token-expert pairs of the routed tokens.", counts.assignments),
            _metric("experts_per_token", "Experts per token and layer, on average so far.", fanout),
        ]
        return "".join(metrics)


def _metric(name: str, text: str, value: float | Mapping[str, float]) -> str:
    """Format one metric, a counter if its name says total. value: a number, or a number for each set of labels."""
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP et_{name} {text}", f"# TYPE et_{name} {kind}"]
    if isinstance(value, Mapping):
        lines += [f"et_{name}{{{labels}}} {number}" for labels, number in value.items()]
    else:
        lines.append(f"et_{name} {value}")
    return "\n".join(lines) + "\n"
