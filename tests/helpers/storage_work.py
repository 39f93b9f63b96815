"""What a worker process of the storage's tests does: takes trials and writes down which, without a
model.
"""

import os
import time
from pathlib import Path

from npt.tools.sweep.spec import design_of
from npt.tools.sweep.storage import Storage


def trials(count: int):
    rates = [1e-5 * (i + 1) for i in range(count)]
    return design_of(
        {"settings": {"max_steps": 4}, "parts": {"a": {"grid": {"learning_rate": rates}}}},
        "work.yaml",
    )


def work(url: str, count: int, log: Path, how: str = "") -> None:
    """Take trials until none is left; `how` "hang" stays with the first."""
    design = trials(count)
    storage = Storage(url, "work", grace=2.0, beat=0.2)
    storage.enqueue(design.trials)
    while storage.progress(design.by_key).open:
        claim = storage.claim(design.by_key)
        if claim is None:
            time.sleep(0.05)
            continue
        with storage.alive(claim):
            with open(log, "a") as stream:
                stream.write(f"{claim.key} {os.getpid()}\n")
            time.sleep(600 if how == "hang" else 0.1)  # the others come to their turn
            storage.finish(claim, {"kl": 0.5, "outcome": "stable"})
