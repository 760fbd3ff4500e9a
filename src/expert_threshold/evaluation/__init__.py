"""Measures the quality of a model by its loss, bits per byte and CORE."""

from .bundle import Baselines, Task, read_bundle
from .core import Answer, ModelScorer, Question, TaskResult, centred, evaluate_task
from .loss import Point, Validation, evaluate, measure_rates
from .results import Progress, Results, ask_core, read_results

__all__ = [
    "Answer", "Baselines", "ModelScorer", "Point", "Progress", "Question", "Results", "Task", "TaskResult",
    "Validation", "ask_core", "centred", "evaluate", "evaluate_task", "measure_rates", "read_bundle", "read_results",
]  # fmt: skip
