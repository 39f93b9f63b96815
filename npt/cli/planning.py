"""The page of `npt doctor --plan`: the memory of a run by formula, and with --measure what windows
of rising size take on this device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from npt.cli.arguments import open_base, plain_table
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError, is_out_of_memory
from npt.flags import build


class Measured(NamedTuple):
    """A window on this device. peak: bytes. peak, seconds: None if it did not fit."""

    strategy: str
    batch_size: int
    predicted: int
    peak: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Page:
    """A plan. memory: a `MemoryPlan`. limit: bytes, None if unknown."""

    name: str
    workload: Any
    memory: Any
    limit: int | None
    measured: list[Measured]

    @property
    def fits(self) -> bool:
        return self.limit is None or max(self.memory.peak, self.memory.of("start")) <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        c = self.workload.training
        return {
            "name": self.name,
            "device": str(self.workload.device),
            "tokens_per_step": c.batch_size * c.gradient_accumulation_steps * self.workload.length,
            "ranks": list(self.workload.ranks.values()),
            "ranks_are_approximate": self.workload.approximate,
            "memory": self.memory.as_dict(),
            "limit_bytes": self.limit,
            "fits": self.fits,
            "measured": [window._asdict() for window in self.measured],
        }


def make_plan(given: Mapping[str, Any], console: Any) -> Page:
    """Plan a run by its flags, and with --measure run windows of it.

    Raises:
        ConfigError: settings that cannot work together.
        ModelError: no such model.
    """
    name, workload = _workload(given)
    limit = workload.training.max_memory_bytes
    memory = workload.plan()
    if limit is None:
        limit = available(workload.device)
    else:
        try:
            memory = workload.fitting(limit)
        except ConfigError:
            memory = workload.plan(1)
    measured: list[Measured] = []
    if given["measure"]:
        with console.status("running windows"):
            measured = list(_windows(given, workload, limit))
    return Page(name, workload, memory, limit, measured)


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


def _windows(given: Mapping[str, Any], workload: Any, limit: int | None) -> Iterator[Measured]:
    """Run windows of 1, 2, 4, ... samples a micro-batch up to --batch_size, until one does not fit:
    by its formula, since a host without memory ends the process, by its measured peak or by the
    device's own error.
    """
    import npt
    from npt.distill.splitting import free_memory
    from npt.planning.measure import measure_window

    def predicted(samples: int) -> int:
        return int(workload.plan(samples).of("micro-batch", "step"))

    if limit is not None and predicted(1) > limit:
        raise ConfigError("--measure runs what is planned, and not even one sample of it would fit")
    model, teacher = _models(given, workload)
    ranks = tuple(workload.ranks.values())
    npt.attach(model, replace(workload.adapter, init="random", ranks=ranks))
    most = workload.training.batch_size
    config = workload.training
    for samples in sorted({*(2**power for power in range(most.bit_length())), most}):
        window = Measured(config.strategy, samples, predicted(samples))
        if limit is None or window.predicted <= limit:
            try:
                found = measure_window(model, config, samples, workload.length, teacher)
                window = window._replace(peak=found[0], seconds=found[1])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            free_memory()
        yield window
        if window.peak is None or (limit is not None and window.peak > limit):
            break


def _models(given: Mapping[str, Any], workload: Any) -> tuple[Any, Any]:
    """Return the base and its teacher; for --shape with random weights, and without a teacher."""
    import npt
    from npt.base.random_base import random_base

    base = build(BaseConfig, given)
    place: dict[str, Any] = {
        "device": workload.device,
        "attn_implementation": base.attn_implementation,
    }
    if given["shape"] is None:
        model, _ = open_base(base, **place)
        precision = base.teacher_precision
        if precision is None:
            return model, None
        return model, npt.load_teacher(base.model_name, precision, **place)
    if workload.teacher is not None:
        raise ConfigError("--measure takes no --teacher_precision with --shape; give --model_name")
    packing = {"quantization": base.quantization, "compute_dtype": workload.compute_dtype}
    model = random_base(workload.config, **packing, **place)
    return (model if base.quantization else model.to(workload.stored)), None


def print_page(page: Page, console: Any) -> None:
    """Print the page for a terminal of 80 columns."""
    from npt.planning.memory import PHASES, shown

    w, c, memory, s = page.workload, page.workload.training, page.memory, page.workload.shape
    stored = "unquantised" if w.quantization is None else w.quantization.upper()
    console.say(
        f"{page.name}: L {s.layers}, D {s.hidden}, F {s.ffn}, V {s.vocab:,}, {stored}, on"
        f" {w.device}",
        f"rank {max(w.ranks.values())} on {len(w.ranks)} layers, {c.strategy}; a step"
        f" of {c.gradient_accumulation_steps} x {c.batch_size} samples of {w.length:,} tokens",
    )
    if w.adapter.init == "random":
        console.say(
            "from a random start; if flags are silent the start is calibrated, as with",
            "--init calibrated --strategy end_to_end --logit_kl_weight 1.0",
        )
    if w.approximate:
        console.say("ranks are planned as if they were even; the calibration gives them out")
    if memory.samples_at_once < c.batch_size:
        console.say(f"{memory.samples_at_once} of {c.batch_size} samples are computed at once")
    phases = PHASES if w.adapter.init == "calibrated" else PHASES[1:]
    rows: dict[str, dict[str, int]] = {}
    for term in memory.terms:
        rows.setdefault(term.name, {}).update(dict.fromkeys(term.phases, term.bytes))
    table = plain_table("memory", *phases)
    for name, sizes in rows.items():
        table.add_row(name, *(shown(sizes[phase]) if phase in sizes else "" for phase in phases))
    table.add_section()
    table.add_row("together", *(shown(memory.of(phase)) for phase in phases))
    console.print()
    console.print(table)
    verdict = f"peak {shown(memory.peak)} in the {memory.phase}"
    if page.limit is not None:
        size = shown(page.limit)
        room = f"the {size} free on {w.device}" if c.max_memory is None else f"--max_memory {size}"
        verdict += f"; it {'fits' if page.fits else 'does not fit'} into {room}"
    console.say(verdict)
    if page.measured:
        table = plain_table("windows", "samples", "predicted", "measured", "seconds")
        for found in page.measured:
            figures = ("does not fit", "")
            if found.peak is not None:
                figures = (shown(found.peak), f"{found.seconds:.3g}")
            samples, predicted = str(found.batch_size), shown(found.predicted)
            table.add_row(found.strategy, samples, predicted, *figures)
        console.print()
        console.print(table)
