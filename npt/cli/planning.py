"""The plan of `npt doctor`: the memory of a run by formula, and with --measure what windows of
rising size take on this device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from npt.cli.arguments import open_base, print_table
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError, is_out_of_memory
from npt.flags import build


def make_plan(given: Mapping[str, Any], console: Any) -> dict[str, Any]:
    """Plan a run by its flags, print the page of it unless --json is given, and return the plan for
    JSON. With --measure windows of it are run.

    Raises:
        ConfigError: settings that cannot work together.
        ModelError: no such model.
    """
    name, workload = _workload(given)
    training = workload.training
    limit, memory = training.max_memory_bytes, workload.plan()
    if limit is None:
        limit = available(workload.device)
    else:
        try:
            memory = workload.fitting(limit)
        except ConfigError:
            memory = workload.plan(1)
    measured: list[dict[str, Any]] = []
    if given["measure"]:
        with console.status("running windows"):
            measured = list(_windows(given, workload, limit))
    window = training.batch_size * training.gradient_accumulation_steps
    plan = {
        "name": name,
        "device": str(workload.device),
        "tokens_per_step": window * workload.length,
        "ranks": list(workload.ranks.values()),
        "memory": memory.as_dict(),
        "limit_bytes": limit,
        "fits": limit is None or max(memory.peak, memory.of("start")) <= limit,
        "measured": measured,
    }
    if not given["json"]:
        _print(plan, workload, memory, console)
    return plan


def available(device: Any) -> int | None:
    """Return the bytes that a run on this device could have now, None if nothing says it: free ones
    and on a GPU those of this process.
    """
    import torch

    if device.type == "cuda":
        if not torch.cuda.is_available():
            return None
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(dict(line.split(":", 1) for line in lines)["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _workload(given: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the model's name and the workload to plan."""
    import torch

    from npt.adapters.fit import check_fit
    from npt.base.load import read_config
    from npt.calibration.calibrate import check_calibration
    from npt.planning.memory import Workload
    from npt.planning.shape import llama_config, parse_shape
    from npt.train.run_setup import check_trainable

    base, adapter, data, training = (
        build(cls, given) for cls in (BaseConfig, NPTConfig, DataConfig, TrainConfig)
    )
    name, device = given["shape"] or base.model_name, given["device"]
    if given["shape"] is None:
        config = read_config(base.model_name)
    elif "model_name" in given:
        raise ConfigError(f"--shape is {name} and --model_name {base.model_name}; give one of them")
    else:
        config = llama_config(parse_shape(name), data.max_length)
        config.dtype = torch.bfloat16
    check_fit(adapter, config, data.max_length)
    check_calibration(adapter)
    check_trainable(adapter, None, base.teacher_precision is not None)
    if given["measure"] and device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but there is no GPU here to --measure on")
    device = None if device is None else torch.device(device)
    return name, Workload.of(base, config, adapter, training, data.max_length, device)


def _windows(
    given: Mapping[str, Any], workload: Any, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Run windows of 1, 2, 4, ... samples a micro-batch up to --batch_size, until one does not fit:
    by its formula, since a host without memory ends the process, by its measured peak or by the
    device's own error. Its peak and its seconds are then None.
    """
    import npt
    from npt.distill.splitting import free_memory
    from npt.planning import measure

    if limit is not None and workload.plan(1).of("micro-batch", "step") > limit:
        raise ConfigError("--measure runs what is planned, and not even one sample of it would fit")
    model, teacher = _models(given, workload)
    ranks = tuple(workload.ranks.values())
    npt.attach(model, replace(workload.adapter, init="random", ranks=ranks))
    most = workload.training.batch_size
    config = workload.training
    for samples in sorted({*(2**power for power in range(most.bit_length())), most}):
        predicted = int(workload.plan(samples).of("micro-batch", "step"))
        peak = seconds = None
        if limit is None or predicted <= limit:
            try:
                peak, seconds = measure.measure_window(
                    model, config, samples, workload.length, teacher
                )
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            free_memory()
        window = {"strategy": config.strategy, "batch_size": samples, "predicted": predicted}
        yield window | {"peak": peak, "seconds": seconds}
        if peak is None or (limit is not None and peak > limit):
            break


def _models(given: Mapping[str, Any], workload: Any) -> tuple[Any, Any]:
    """Return the base and its teacher; for --shape with random weights, and without a teacher."""
    import npt
    from npt.base.random_base import random_base

    base = build(BaseConfig, given)
    place = {"device": workload.device, "attn_implementation": base.attn_implementation}
    if given["shape"] is None:
        model, _ = open_base(base, **place)
        precision = base.teacher_precision
        teacher = precision and npt.load_teacher(base.model_name, precision, **place)
        return model, teacher
    if workload.teacher is not None:
        raise ConfigError("--measure takes no --teacher_precision with --shape; give --model_name")
    packing = {"quantization": base.quantization, "compute_dtype": workload.compute_dtype}
    model = random_base(workload.config, **packing, **place)
    return (model if base.quantization else model.to(workload.stored)), None


def _print(plan: dict[str, Any], w: Any, memory: Any, console: Any) -> None:
    """Print the plan for a terminal of 80 columns."""
    from npt.planning.memory import PHASES, shown

    c, s, limit = w.training, w.shape, plan["limit_bytes"]
    stored = "unquantised" if w.quantization is None else w.quantization.upper()
    console.say(
        f"{plan['name']}: L {s.layers}, D {s.hidden}, F {s.ffn}, V {s.vocab:,}, {stored}, on"
        f" {w.device}",
        f"rank {max(plan['ranks'])} on {len(plan['ranks'])} layers, {c.strategy}; a"
        f" step of {c.gradient_accumulation_steps} x {c.batch_size} samples of {w.length:,} tokens",
    )
    if w.adapter.init == "random":
        console.say("from a random start; --init calibrated includes the closed-form start")
    if memory.samples_at_once < c.batch_size:
        console.say(f"{memory.samples_at_once} of {c.batch_size} samples are computed at once")
    phases = PHASES if w.adapter.init == "calibrated" else PHASES[1:]
    sizes: dict[str, dict[str, int]] = {}
    for term in memory.terms:
        sizes.setdefault(term.name, {}).update(dict.fromkeys(term.phases, term.bytes))
    sizes["together"] = {phase: memory.of(phase) for phase in phases}
    rows = [
        [term, *(shown(row[phase]) if phase in row else "" for phase in phases)]
        for term, row in sizes.items()
    ]
    print_table(console, ["memory", *phases], rows)
    verdict = f"peak {shown(memory.peak)} in the {memory.phase}"
    if limit is not None:
        room = f"--max_memory {shown(limit)}"
        if c.max_memory is None:
            room = f"the {shown(limit)} free on {w.device}"
        verdict += f"; it {'fits' if plan['fits'] else 'does not fit'} into {room}"
    console.say(verdict)
    rows = []
    for m in plan["measured"]:
        took = ["does not fit", ""]
        if m["peak"] is not None:
            took = [shown(m["peak"]), f"{m['seconds']:.3g}"]
        rows.append([m["strategy"], str(m["batch_size"]), shown(m["predicted"]), *took])
    if rows:
        heads = ["windows", "samples", "predicted", "measured", "seconds"]
        print_table(console, heads, rows)
