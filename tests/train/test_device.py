"""What training changes of the process it runs in, and gives back."""

from __future__ import annotations

import gc

from expert_threshold.train.device import objects_at_rest


def test_objects_rest_while_a_run_trains_and_are_garbage_again_after() -> None:
    before = gc.get_freeze_count()
    with objects_at_rest():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == before
