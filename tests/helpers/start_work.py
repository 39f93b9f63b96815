"""What the processes of a test do with the closed-form start. Everything goes in and comes out as
plain values.
"""

import io
import math
import random
from typing import Any
from unittest import mock

import numpy as np
import torch
from process_work import loaded, records
from rich.console import Console

import npt
from faults.runs import NoTokenizer
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.batch import Sample
from npt.calibration import sensitivity
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.distributed.processes import ProcessGroup
from npt.train.start import calibrated
from npt.train.trainer import Trainer

RARE = 127
"""A token of one sample alone."""

ADAPTERS = NPTConfig(
    rank=8, active=4, token_rank=6, layers="1-3", additive_scale=0.5, init="calibrated"
)


def samples(seed: int = 0) -> list[Sample]:
    """Random walks of 12 to 24 tokens: a token depends on those before it."""
    source, found = random.Random(seed), []
    for number in range(52):
        ids = [source.randrange(3, 120)]
        while len(ids) < source.randint(12, 24):
            ids.append(3 + (ids[-1] * 5 + ids[len(ids) // 2] + source.randrange(6)) % 120)
        found.append(Sample(f"walk-{number}", tuple(ids)))
    return found


def with_a_rare_one() -> list[Sample]:
    return [*samples()[:51], Sample("rare", (5, RARE, 9))]


def student(base: str, shared_by: ProcessGroup | None = None) -> Any:
    """The base with fresh adapters; shared by processes, a copy of its own."""
    if shared_by is not None:
        model = npt.load_base(base, quantization="nf4", device="cpu")[0]
        npt.attach(model, ADAPTERS)
        npt.shard_base(model, shared_by)
        return model
    model = loaded(base)
    npt.detach(model)
    npt.attach(model, ADAPTERS)
    return model


def state(model: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in adapter_parameters(model).items()}


def started(processes: ProcessGroup, base: str, sharded: bool = False) -> dict[str, Any]:
    """The start of seven batches, and how near the student is to its teacher on other text."""
    model = student(base, processes if sharded else None)
    calibration = npt.calibrate(
        model, NoTokenizer(), samples(), 800, batch_size=8, processes=processes
    )
    fidelity = npt.evaluate(model, NoTokenizer(), samples(9)[:16], batch_size=16)
    return {
        "layers": {index: vars(layer) for index, layer in calibration.layers.items()},
        "tokens": calibration.tokens,
        "cuts": {
            index: (layer.npt.B["stream"].double() @ layer.npt.A.double()).detach().numpy()
            for index, layer in npt_layers(model)
        },
        "kl": fidelity.student.kl,
        "state": state(model),
    }


def refused(processes: ProcessGroup, base: str) -> dict[str, str]:
    """The errors of starts that one process cannot make, and whether each left the adapters as they
    were and the processes in step.
    """
    model, errors = student(base), {}
    before, product, data = state(model), sensitivity.product, with_a_rare_one()

    def lack(*rows: Any) -> Any:
        if processes.index == processes.size - 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return product(*rows)

    def attempt(name: str, **settings: Any) -> None:
        usual = {"tokens": 10_000, "batch_size": 8, "processes": processes}
        try:
            npt.calibrate(model, NoTokenizer(), **{"data": data, **usual, **settings})
        except Exception as error:
            after = state(model)
            kept = all(value.tobytes() == after[key].tobytes() for key, value in before.items())
            total = processes.sums([1.0])
            errors[name] = f"{type(error).__name__}: {error}" * (kept and total == [processes.size])

    embedding = model.model.embed_tokens.weight.data
    row = embedding[RARE].clone()
    embedding[RARE] = math.nan
    attempt("nan")
    embedding[RARE] = row
    with mock.patch.object(sensitivity, "product", lack):
        attempt("memory")
    attempt("other settings", batch_size=8 + processes.index)
    attempt("other data", data=data[processes.index :])
    attempt("too little", data=data[:1] if processes.index else data)
    return errors


def begun_again(processes: ProcessGroup, base: str, out: str) -> dict[str, Any]:
    """The start of a run for which the last process has memory for one sample at a time."""
    said, product, rows_at_once = io.StringIO(), sensitivity.product, []

    def short(rows: Any, others: Any) -> Any:
        rows_at_once.append(len(rows))
        if processes.index == processes.size - 1 and len(rows) > 9:  # records have 6 to 9
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return product(rows, others)

    trainer = Trainer(
        student(base),
        NoTokenizer(),
        records(60),
        TrainConfig(output_dir=out, batch_size=4, eval_samples=2, calibration_tokens=200),
        data_config=DataConfig(max_length=16),
        eval_data=records(3),
        console=Console(file=said, width=200),
        processes=processes,
    )
    with mock.patch.object(sensitivity, "product", short):
        calibrated(trainer.setup, trainer.data)
    return {
        "said": said.getvalue(),
        "last": max(rows_at_once[-4:]),
        "state": state(trainer.setup.model),
    }


def refused_sharded(processes: ProcessGroup, base: str) -> str:
    """The error of a start on a sharded base that meets a NaN on one process alone."""
    model = student(base, processes)
    before = state(model)
    model.model.embed_tokens.weight.data[RARE] = math.nan
    try:
        npt.calibrate(
            model, NoTokenizer(), with_a_rare_one(), 10_000, batch_size=8, processes=processes
        )
    except npt.NPTError as error:
        after = state(model)
        kept = all(value.tobytes() == after[key].tobytes() for key, value in before.items())
        return f"{type(error).__name__}: {error}" * (kept and processes.sums([1.0])[0] > 1)
    return ""


def all_of_it(processes: ProcessGroup, base: str, out: str) -> dict[str, Any]:
    return {
        "started": started(processes, base),
        "sharded": started(processes, base, sharded=True),
        "refused sharded": refused_sharded(processes, base),
        "refused": refused(processes, base),
        "begun again": begun_again(processes, base, out),
    }
