"""What the processes of a test do with a base that is sharded over them, or whole. Everything goes
in and comes out as plain values.
"""

import contextlib
import io
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from process_work import looped, micro_batch, trained
from torch.distributed.fsdp import fully_shard

import npt
from faults.runs import NoTokenizer
from npt.adapters.converted import adapter_parameters
from npt.cli.main import main
from npt.config import NPTConfig, TrainConfig
from npt.distill.strategies import STRATEGIES
from npt.distributed.processes import ProcessGroup
from npt.doctor.measure import measure_window, storage_bytes, tensors_of
from npt.doctor.plan import Workload
from npt.evaluation import evaluate
from npt.guard.parallel import local
from npt.packed import quantized_linears
from npt.tracer.watchdogs import base_fault

STRATEGY_SETTINGS: dict[str, dict[str, Any]] = {
    "local": {},
    "propagated": {"strategy": "propagated"},
    "end_to_end": {"strategy": "end_to_end", "logit_kl_weight": 0.5},
    "recomputed": {"strategy": "end_to_end", "gradient_checkpointing": True},
}

ADAPTERS = NPTConfig(rank=4, layers="1,3", additive_scale=1.0)


def fresh(
    base: str, quantization: str | None, form: NPTConfig = ADAPTERS, later: bool = False
) -> Any:
    model = npt.load_base(base, quantization=quantization, device="cpu", layers_later=later)[0]
    npt.attach(model, form)
    return model


def whole_weights(model: Any) -> list[str]:
    """Weights of the decoder layers, adapters not, of which this process has all."""
    return [
        name
        for name, parameter in model.model.layers.named_parameters()
        if "npt." not in name and not hasattr(parameter, "full_tensor") and parameter.numel() > 0
    ]


def computed(processes: ProcessGroup, base: str, quantization: str | None) -> dict[str, Any]:
    """Teacher, student, loss, gradients and figures; with more than one process the base is
    sharded, and each process has its own batch.
    """
    model = fresh(base, quantization)
    hash_before = npt.base_hash(model)
    if processes.size > 1:
        model = fresh(base, quantization, later=True)
        npt.shard_base(model, processes)
    found: dict[str, Any] = {"hash": npt.base_hash(model) == hash_before}
    whole: list[int] = []  # layers that are, while one of them computes
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(
            lambda *_: whole.append(len({name.split(".")[0] for name in whole_weights(model)}))
        )
    batches = [micro_batch(f"good {process}") for process in range(3)]
    for process in [processes.index] if processes.size > 1 else range(3):
        batch = batches[process]
        with torch.no_grad():
            student = model(batch.input_ids, attention_mask=batch.attention_mask).logits
            with npt.adapters_disabled(model):
                teacher = model(batch.input_ids, attention_mask=batch.attention_mask).logits
        here = found[f"process {process}"] = {
            "student": student.numpy(),
            "teacher": teacher.numpy(),
        }
        for name, settings in STRATEGY_SETTINGS.items():
            for parameter in adapter_parameters(model).values():
                parameter.grad = None
            config = TrainConfig(regularization_lambda=0.1, **settings)
            here[name] = STRATEGIES[config.strategy](model, batch, config).loss.numpy()
            for parameter, p in adapter_parameters(model).items():
                here[f"{name}: {parameter}"] = p.grad.numpy().copy()
    records = [{"input_ids": list(range(5, 15))}, {"input_ids": [9, 8, 7, 6]}]
    found["figures"] = npt.evaluate(
        model, NoTokenizer(), records, divergence_prompts=2, max_new_tokens=4
    ).as_dict()
    found["base fault"] = base_fault(model)
    model = fresh(base, quantization, replace(ADAPTERS, init="calibrated"))
    if processes.size > 1:
        npt.shard_base(model, processes)
    walks = [{"input_ids": [3 + (7 * i + j * j) % 97 for j in range(16)]} for i in range(9)]
    npt.calibrate(model, NoTokenizer(), walks, 128, batch_size=2, processes=processes)
    start = {name: p.detach().numpy().copy() for name, p in adapter_parameters(model).items()}
    return found | {"whole": whole_weights(model), "most": max(whole), "start": start}


def attempted(processes: ProcessGroup, base: str) -> dict[str, str]:
    """The errors of what cannot be done with a sharded base; all processes meet them alike."""
    model = fresh(base, "nf4")
    acts: dict[str, Callable[[], Any]] = {
        "shard": lambda: npt.shard_base(model, processes),
        "detach": lambda: npt.detach(model),
    }
    with mock.patch("npt.adapters.sharded_base.fully_shard", corrupting):
        errors = {"corrupt": raised(lambda: npt.shard_base(fresh(base, "nf4"), processes))}
    npt.shard_base(model, processes)
    for what, act in acts.items():
        errors[what] = raised(act)
    return errors


def measured(processes: ProcessGroup, quantization: str | None) -> tuple[int, int, int, int]:
    """The bytes of a process's share of the embedded base, measured and planned, and those of the
    highest moment of a window.
    """
    model = npt.load_base("tiny", quantization=quantization, device="cpu", layers_later=True)[0]
    adapter, training = NPTConfig(rank=4), TrainConfig(batch_size=1)
    npt.attach(model, adapter)
    npt.shard_base(model, processes)
    stored = torch.bfloat16 if quantization else torch.float32
    planned = Workload(
        model.config, adapter, training, 16, quantization, stored, processes=processes.size
    )
    states = [module.weight.quant_state for _, module in quantized_linears(model)]
    shares = [local(p) for p in model.model.parameters()]
    held = [p for p in shares if p.requires_grad]
    share = storage_bytes(tensors_of([p for p in shares if not p.requires_grad], states))
    # FSDP's storages are not walked: what they hold is known from the shares
    with mock.patch(
        "npt.doctor.measure.storage_bytes", lambda _: share + storage_bytes(tensors_of(held))
    ):
        peak, _ = measure_window(model, training, 1, 16)
    terms = {term.name: term.bytes for term in planned.plan().terms}
    base = next(size for name, size in terms.items() if name.startswith("base"))
    return share, base, peak, planned.plan().of("micro-batch", "step")


def started(
    processes: ProcessGroup, base: str, out: str, quant_type: str, *flags: str
) -> tuple[int, str]:
    """The status of `npt pretrain` from a saved adapter, and what it says."""
    said = io.StringIO()
    arguments = ["pretrain", "--model_name", base, "--use_quantization", "--output_dir", out]
    arguments += ["--quant_type", quant_type, "--max_steps", "1", "--max_length", "32"]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main([*arguments, "--num_samples", "8", "--eval_samples", "2", *flags])
    return status, " ".join(said.getvalue().split())


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except npt.NPTError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def corrupting(module: Any, **named: Any) -> Any:
    """FSDP, if it turned one bit of one packed weight."""
    if hasattr(module, "mlp") and module.self_attn.layer_idx == 2:
        module.mlp.up_proj.weight.data[3] ^= 1
    return fully_shard(module, **named)


def run(
    processes: ProcessGroup,
    base: str,
    out: str,
    sharded: bool,
    windows: Sequence[Sequence[str]] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """A whole run, or a loop over planted windows, on a base that is sharded or not."""
    made: list[Any] = []

    def student(_: str) -> Any:
        made.append(fresh(base, "nf4"))
        if sharded:
            npt.shard_base(made[0], processes)
        return made[0]

    with mock.patch("process_work.student", student):
        found = (
            trained(processes, base, out, **settings)
            if windows is None
            else looped(processes, base, out, windows, **settings)
        )
    return found | {"whole": whole_weights(made[0])}


def lost_in_an_evaluation(processes: ProcessGroup, base: str, out: str) -> None:
    """A run of which process 1 is killed while the student is measured first."""
    final_states, calls = evaluate.final_states, itertools.count()

    def dying(*arguments: Any) -> Any:
        if next(calls) == 1 and processes.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return final_states(*arguments)

    with mock.patch("npt.evaluation.evaluate.final_states", dying):
        run(processes, base, out, True, count=4)


def runs(
    processes: ProcessGroup, base: str, out: str, plans: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Several whole runs, one after the other, by name."""
    return {name: run(processes, base, f"{out}/{name}", **plan) for name, plan in plans.items()}


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray], what: str = "") -> None:
    """Not one bit differs."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), f"{what} {name}"
