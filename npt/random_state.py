"""torch's random state: taken, put back, and checked where it comes out of a file.

Of the CPU and of every CUDA device, whose generators keep theirs (a seed and an offset) on the
host: nothing here waits for a device. Python's and numpy's are not looked at; nothing in a step
draws from them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from npt.errors import NPTError
from npt.stored import Header, described, read_tensors, shown

_CPU_BYTES = 5056  # torch's Mersenne Twister with what stands around it
_CUDA_BYTES = 16


def random_state() -> dict[str, Tensor]:
    """Of this process, by device: `cpu`, and `cuda.INDEX` for every CUDA device once CUDA is in
    use.
    """
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {
            f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())
        }
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Of this process; of devices that it does not have nothing is set."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif int(name.removeprefix("cuda.")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(name.removeprefix("cuda.")))


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Whatever is drawn within the context, afterwards the random state is as before. Also a
    decorator.
    """
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def named_draws(*name: object) -> Iterator[None]:
    """Within the context the random numbers are those of `name`, whatever was drawn before;
    afterwards the state is as before.

    Args:
        name: numbers and text; equal names draw equal numbers, in every process.
    """
    digest = hashlib.sha256(repr(name).encode()).digest()
    with kept_random_state():
        seed = int.from_bytes(digest[:8], "big") >> 1
        # Not torch.manual_seed, which makes CUDA's seeding wait in a queue, with a stack trace,
        # where CUDA is not in use.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        yield


def micro_batch_draws(
    seed: int, sample_ids: tuple[str, ...], offset: int
) -> AbstractContextManager[None]:
    """Return a context in which random numbers are those of one micro-batch in training.

    Args:
        seed: of the run.
        sample_ids, offset: of its samples, and their place in the data.
    """
    return named_draws("micro-batch", seed, offset, *sample_ids)


def read_random_state(
    path: Path, prefix: str, headers: Mapping[str, Header], error: type[NPTError]
) -> dict[str, Tensor]:
    """The states that a safetensors file holds under `prefix`, as `random_state` gave them.

    Args:
        path: of the file.
        prefix: of their names.
        headers: of the file.
        error: what is raised where one is missing, misshapen or not a state that torch takes.
    """
    names = [name for name in headers if name.startswith(prefix)]
    for name in names:
        known = re.fullmatch(r"cpu|cuda\.[0-9]{1,3}", name.removeprefix(prefix))
        if not known or headers[name] != (
            "U8",
            (_CPU_BYTES if known[0] == "cpu" else _CUDA_BYTES,),
        ):
            raise error(
                f"{path}: the tensor {shown(name)}, {described(headers[name])}, is no random state;"
                " copy it again"
            )
    if f"{prefix}cpu" not in names:
        raise error(f"{path} lacks the tensor {prefix}cpu; copy it again")
    states = {
        name.removeprefix(prefix): tensor
        for name, tensor in read_tensors(path, names, error).items()
    }
    for name, state in states.items():
        if name == "cpu" or torch.cuda.is_initialized():
            try:
                torch.Generator(name.split(".")[0]).set_state(state)
            except RuntimeError as problem:
                raise error(
                    f"{path}: {prefix}{name} is no random state ({problem}); copy it again"
                ) from problem
    return states
