"""torch's random state, of the CPU and of every CUDA device: taken, restored, seeded for a batch.

CUDA's generators keep theirs (a seed and an offset) on the host: nothing here waits for a device.
Python's and numpy's are left alone; nothing in a step draws from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """Return this process's, by device: `cpu`, and `cuda.INDEX` once CUDA is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {
            f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())
        }
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Set this process's; states of devices that it does not have are ignored."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif int(name.removeprefix("cuda.")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name.removeprefix("cuda.")))


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random state after the context. Also a decorator."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


@contextmanager
def micro_batch_draws(seed: int, sample_ids: tuple[str, ...], offset: int) -> Iterator[None]:
    """Draw the random numbers of one micro-batch in training within the context, the same in every
    process; restore the state after it.

    Args:
        seed: of the run.
        sample_ids, offset: of its samples, and their place in the data.
    """
    name = ("micro-batch", seed, offset, *sample_ids)
    digest = hashlib.sha256(repr(name).encode()).digest()
    with kept_random_state():
        number = int.from_bytes(digest[:8], "big") >> 1
        # Not torch.manual_seed, which queues CUDA's seeding, with a stack trace, if CUDA is unused.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)
        yield
