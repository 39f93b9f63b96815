"""Save, restore and seed torch's random state on the CPU and all CUDA devices.

CUDA's generators keep their state (a seed and an offset) on the host, so nothing here waits for a
device. Python's and numpy's generators are left alone; no step draws from them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """Return the random state by device: `cpu`, and `cuda.INDEX` once CUDA is in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda.{index}"] = state
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Set the random state; ignore states of devices that this process does not have."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
            continue
        index = int(name.removeprefix("cuda."))
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)


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
    """Seed the random numbers of a micro-batch, equally in every process, by the run's seed and the
    ids and the offset of its samples; restore the state after it.
    """
    name = ("micro-batch", seed, offset, *sample_ids)
    digest = hashlib.sha256(repr(name).encode()).digest()
    with kept_random_state():
        number = int.from_bytes(digest[:8], "big") >> 1
        # torch.manual_seed would queue a CUDA call, with a stack trace, if CUDA is not in use
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)
        yield
