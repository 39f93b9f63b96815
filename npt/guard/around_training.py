"""A guarded Trainer before, after and around its training."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from npt.errors import ConfigError

_BEGUN = "checkpoint-is-incomplete.txt"
"""In a folder of JITCheckpointCallback until it is whole."""

_GATHERING = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


def refuse_unfit(trainer: Any) -> None:
    """Raise ConfigError for a Trainer whose run a guard cannot make."""
    if hasattr(trainer, "_buffered_inputs"):  # of TRL: inputs by the number of calls so far
        raise ConfigError(
            f"{type(trainer).__name__} makes the inputs of several micro-batches at once, and a"
            " guard cannot compute one of them again; train it unguarded"
        )
    adapters = sys.modules.get("npt.adapters.converted")  # not loaded: it is no student
    if adapters and adapters.is_attached(trainer.model) and trainer.args.save_strategy != "no":
        raise ConfigError(
            "a Trainer's checkpoint cannot hold an NPT student; pass save_strategy='no' and"
            " call npt.save_adapter(model, folder) after training, or train with npt.Trainer"
        )


def remove_begun(folder: Path) -> None:
    """Remove the folder that transformers' JITCheckpointCallback made for a checkpoint which is not
    saved: a resume would take it for the newest.
    """
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {_BEGUN}:
        shutil.rmtree(folder)


def give_back(optimizer: Any) -> None:
    """Let an optimizer whose step was a guard's step by itself again."""
    own = vars(optimizer) if optimizer is not None else {}
    if "_before_guard" in own:
        del own["step"]
        before = own.pop("_before_guard")
        if before is not None:
            own["step"] = before


@contextmanager
def alone(accelerator: Any) -> Iterator[None]:
    """Let accelerate gather nothing within the context, as TRL does for its metrics.

    A refused micro-batch may end early, and its process computes fewer of them: whoever gathered in
    one would wait for ever. Metrics are then the main process's own.
    """
    names = _GATHERING if accelerator.num_processes > 1 else ()
    for name in names:
        setattr(accelerator, name, lambda value, *_, **__: value)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)
