"""No memory at any allocation of a step: the step is made or it is not, and the next one is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_cuda import simulated_cuda
from students import load_student, make_batch
from windows import StudentStep

import npt
from npt.distill.strategies import drive
from npt.errors import is_out_of_memory

WAYS: dict[str, dict[str, Any]] = {
    "local": {"skip_spikes": True},
    "end_to_end": {"strategy": "end_to_end", "logit_kl_weight": 0.5, "skip_spikes": False},
}


def steps_of(way: str, late: bool) -> tuple[StudentStep, Callable[[], None], Callable[[], Any]]:
    """A student's steps, what makes one of them, and what returns all of its state."""
    config = npt.TrainConfig(learning_rate=1e-2, **WAYS[way])
    steps = StudentStep(load_student("cuda"), drive, config, [1e-2] * 9, late=late)
    batches = [make_batch("right", seed) for seed in range(2)]

    def step() -> None:
        steps.run([batch.pinned() for batch in batches])
        steps.guard.flush()

    def state() -> list[Any]:
        tensors = [t.cpu() for _, t in steps.update._tensors()]
        return [steps.window.applied_steps, steps.window.known_steps, *tensors]

    return steps, step, state


def sweep(way: str, late: bool, places: Callable[[int], list[int]]) -> None:
    with simulated_cuda() as card:
        _, step, state = steps_of(way, late)
        expected = []
        for _ in range(3):
            expected.append(state())
            first = card.allocations
            step()
        count = card.allocations - first
        assert count > 124

        steps, step, state = steps_of(way, late)
        step()  # which makes what lasts
        for place in places(count):
            card.allocations, card.full_at = 0, place
            with pytest.raises((RuntimeError, MemoryError)) as error:
                step()
            card.full_at = None
            assert is_out_of_memory(error.value), place
            steps.guard.clear()
            steps.guard.flush()
            found = state()
            assert found[:2] == [1, 1], place
            torch.testing.assert_close(found, expected[1], rtol=0.0, atol=0.0)
        step()
        torch.testing.assert_close(state(), expected[2], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("late", [True, False])
def test_no_memory_at_some_allocations_leaves_the_step_before(late) -> None:
    sweep("local", late, lambda count: [1, count // 2, count - 9, count - 3, count])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "late", "first"),
    [("local", True, 1), ("local", False, 2), ("end_to_end", True, 3), ("end_to_end", False, 4)],
)
def test_no_memory_at_any_allocation_leaves_the_step_before(way, late, first) -> None:
    """Each ninth of the guard's at the end, and each sixty-first of forward and backward, others in
    each case; all of them take minutes, and held.
    """
    sweep(
        way,
        late,
        lambda count: [*range(first, count - 150, 61), *range(count - 150 + first, count + 1, 9)],
    )
