"""What `npt doctor --plan` says: the memory and the time of a run before it is begun, and against
what it really takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError
from npt.flags import build


@dataclass(frozen=True)
class Page:
    """All that is said of a plan.

    workload: what was planned. memory: `MemoryPlan`. limit: bytes, None where nothing says how many
    there are. remedies: settings that would fit. times: `StepTime` by strategy. measured:
    `Measured` by strategy, of what was run. calibration: forecast of --init calibrated, if that is
    asked for.
    """

    name: str
    workload: Any
    memory: Any
    limit: int | None
    remedies: list[tuple[str, int]]
    times: dict[str, Any]
    measured: dict[str, Any]
    calibration: CalibrationForecast | None = None

    @property
    def fits(self) -> bool:
        return self.limit is None or self.memory.peak <= self.limit

    @property
    def tokens(self) -> int:
        """Of a window."""
        c = self.workload.training
        return c.batch_size * c.gradient_accumulation_steps * self.workload.length

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "device": str(self.workload.device),
            "tokens_per_step": self.tokens,
            "ranks": list(self.workload.ranks),
            "ranks_are_approximate": self.workload.approximate,
            "memory": self.memory.as_dict(),
            "limit_bytes": self.limit,
            "fits": self.fits,
            "remedies": [{"setting": flag, "peak_bytes": peak} for flag, peak in self.remedies],
            "time": {
                name: {**t.as_dict(), "tokens_per_second": self.tokens / t.seconds}
                for name, t in self.times.items()
            },
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "measured": {
                name: {
                    **m.as_dict(),
                    "errors": {
                        "peak_bytes": self.memory.peak / m.peak - 1,
                        **{
                            phase: self.memory.of(phase) / size - 1
                            for phase, size in m.phases.items()
                        },
                        **(
                            {"seconds": self.times[name].seconds / m.seconds - 1}
                            if name in self.times
                            else {}
                        ),
                    },
                }
                for name, m in self.measured.items()
            },
        }


@dataclass(frozen=True)
class CalibrationForecast:
    """What --init calibrated takes before the first step.

    device_bytes: at its highest moment, the base included; 0 on a CPU. host_bytes: of memory, on a
    CPU the base included. disk_bytes: of temporary files. placement: of matrices and rows. seconds:
    in all, of which eigendecomposition_seconds; None without a trial.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    placement: str
    seconds: float | None
    eigendecomposition_seconds: float | None


def forecast_calibration(
    workload: Any, base: int, limit: int | None, trial: bool
) -> CalibrationForecast:
    """Forecast the calibrated start of a workload.

    Args:
        workload: whose adapters start calibrated.
        base: bytes of the base.
        limit: bytes of the device, None if nothing says how many there are.
        trial: time a product and an eigendecomposition.
    """
    from npt.adapters.fit import resolve_layers
    from npt.calibration.plan import plan
    from npt.calibration.precision import full_precision

    w, c, device = workload, workload.training, workload.device
    work = plan(
        w.form,
        w.config,
        resolve_layers(w.adapter.layers, w.config.num_hidden_layers),
        w.ranks,
        c.calibration_tokens,
        c.calibration_rounds,
        inputs=c.calibration_inputs,
        rank_budget=c.rank_budget,
        batch=(c.batch_size, w.length),
    )
    on_gpu = device.type == "cuda"
    free = max(0, (limit or 0) - base) if on_gpu else 0
    placement = work.place(device, free)
    seconds = None
    if trial:
        with full_precision():
            seconds = work.seconds(device, placement)
    return CalibrationForecast(
        base + work.peak(device, placement) if on_gpu else 0,
        work.ram(device, placement) + (0 if on_gpu else base),
        work.disk(placement),
        str(placement),
        None if seconds is None else seconds.total,
        None if seconds is None else seconds.factorisations,
    )


def make_plan(given: Mapping[str, Any], console: Any) -> Page:
    """Plan what the flags say, with a trial for the time, and run it where that is asked for.

    Raises:
        ConfigError: settings that cannot work together.
        ModelError: no such model.
    """
    import torch

    from npt.planning.memory import available
    from npt.planning.plan import Planner, remedies
    from npt.planning.timing import predict_time

    name, workload = _workload(given)
    training = workload.training
    precision = given.get("matmul_precision", "auto")
    # on a card with TF32 it takes that, and without TF32 the settings are the same
    if precision == "auto":
        precision = "high" if workload.device.type == "cuda" else "highest"
    torch.set_float32_matmul_precision(precision)
    with console.status("counting the memory of a few layers"):
        planner = Planner(workload)
        limit = available(workload.device)
        if training.max_memory is not None:
            limit = training.max_memory_bytes
            try:
                memory = planner.fitting(limit)
            except ConfigError:
                memory = planner.plan(1)
        else:
            memory = planner.plan()
        fits = limit is None or memory.peak <= limit
        found = [] if fits or limit is None else remedies(workload, limit, planner.counts)
        base = memory.terms[0].bytes
        del planner  # nothing hollow is to be there when memory is measured
    trial = not given["no_trial"]
    calibration = (
        forecast_calibration(workload, base, limit, trial)
        if workload.adapter.init == "calibrated"
        else None
    )
    times: dict[str, Any] = {}
    if trial and fits:
        with console.status("timing one layer"):
            times = predict_time(workload, memory.samples_at_once)
    measured = {}
    if given["measure"]:
        if not fits:
            raise ConfigError(
                "--measure runs what is planned, which would not fit; see npt doctor --plan without"
                " it for what would"
            )
        with console.status("running a few steps"):
            measured = _measured(given, workload, memory)
    return Page(name, workload, memory, limit, found, times, measured, calibration)


def _workload(given: Mapping[str, Any]) -> tuple[str, Any]:
    """What the model is called, and what is to be planned."""
    import torch

    from npt.adapters.fit import check_fit
    from npt.base.load import read_config
    from npt.calibration.calibrate import check_calibration
    from npt.planning.named_models import llama_config, parse_shape
    from npt.planning.workload import Workload
    from npt.train.run_checks import check_trainable

    base, adapter, data, training = (
        build(cls, given) for cls in (BaseConfig, NPTConfig, DataConfig, TrainConfig)
    )
    if given["shape"] is None:
        name, config, stored = base.model_name, read_config(base.model_name), None
    elif "model_name" in given:
        raise ConfigError(
            f"--shape is {given['shape']} and --model_name {base.model_name}; give one of them"
        )
    else:
        name, config, stored = (
            given["shape"],
            llama_config(parse_shape(given["shape"]), data.max_length),
            torch.bfloat16,
        )
    layers = check_fit(adapter, config, data.max_length)
    check_calibration(adapter, training.rank_budget, len(layers), config.hidden_size)
    check_trainable(adapter, None, base.teacher_precision is not None)
    if given["device"] == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device is cuda, but there is no GPU here; a plan is made on the device that it"
            " is for"
        )
    device = None if given["device"] is None else torch.device(given["device"])
    return name, Workload.of(
        base, config, adapter, training, data.max_length, device, stored=stored
    )


def _measured(given: Mapping[str, Any], workload: Any, memory: Any) -> dict[str, Any]:
    """The real base where its weights are at hand, else one with random weights: neither time nor
    memory depends on them.
    """
    import npt
    from npt.planning.timing import made_base, measure
    from npt.step.splitting import MicroBatchSplitter

    teacher = None
    if given["shape"] is not None:
        model = made_base(workload, workload.config)
        if workload.teacher is not None:
            other = replace(workload, quantization=None, stored=workload.teacher)
            teacher = made_base(other, workload.config)
    else:
        base = build(BaseConfig, given)
        where = {"device": workload.device, "attn_implementation": base.attn_implementation}
        model, _ = npt.load_base(
            base.model_name,
            quantization=base.quantization,
            use_fp16=base.use_fp16,
            compute_dtype=base.compute_dtype,
            **where,
        )
        if base.teacher_precision is not None:
            teacher = npt.load_teacher(base.model_name, base.teacher_precision, **where)
    npt.attach(model, replace(workload.form, init="random"))
    return {
        name: measure(
            model,
            workload,
            config,
            MicroBatchSplitter(memory.samples_at_once),
            memory.evaluated_at_once,
            teacher=teacher,
        )
        for name, (_, config) in workload.stages.items()
    }


def print_page(page: Page, console: Any) -> None:
    """The page for a terminal of 80 columns."""
    from npt.planning.memory import PHASES, shown

    w, c = page.workload, page.workload.training
    stored = "unquantised" if w.quantization is None else w.quantization.upper()
    shape = w.shape
    console.print(
        f"{page.name}: L {shape.layers}, D {shape.hidden}, F {shape.ffn}, V {shape.vocab:,},"
        f" {stored}, on {w.device}",
        soft_wrap=True,
    )
    console.print(
        f"rank {max(w.ranks)} on {w.depth.converted} layers, {' then '.join(w.stages)}; a step of"
        f" {c.gradient_accumulation_steps} x {c.batch_size} samples of {w.length:,} tokens",
        soft_wrap=True,
    )
    if w.adapter.init == "random":
        console.print("from a random start; where flags are silent a run starts solved, as with")
        console.print("--init calibrated --strategy end_to_end --logit_kl_weight 1.0")
    if w.approximate:
        console.print(
            f"--rank_budget {c.rank_budget} is planned as if it were spent evenly; the calibration"
            " spends it",
            soft_wrap=True,
        )
    if page.memory.samples_at_once < c.batch_size:
        console.print(
            f"{page.memory.samples_at_once} of {c.batch_size} samples of a micro-batch are computed"
            " at once",
            soft_wrap=True,
        )
    console.print()
    table = _table("memory", *PHASES)
    rows: dict[str, dict[str, int]] = {}
    for term in page.memory.terms:
        rows.setdefault(term.name, {}).update(dict.fromkeys(term.phases, term.bytes))
    for term_name, sizes in rows.items():
        table.add_row(
            term_name, *(shown(sizes[phase]) if phase in sizes else "" for phase in PHASES)
        )
    table.add_section()
    table.add_row("together", *(shown(page.memory.of(phase)) for phase in PHASES))
    console.print(table)
    _print_verdict(page, console)
    if page.calibration is not None:
        for line in _calibration_lines(page.calibration, str(w.device)):
            console.print(line, soft_wrap=True)
    for name, time in page.times.items():
        console.print()
        table = _table(f"time of a step, {name}", "seconds")
        for part, seconds in time.parts.items():
            table.add_row(part, f"{seconds:.3g}")
        table.add_section()
        table.add_row("together", f"{time.seconds:.3g}")
        console.print(table)
        layer = (
            "one layer" if time.narrowed == 1 else f"one layer of 1/{time.narrowed} of the width"
        )
        speed = page.tokens / time.seconds
        console.print(
            f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}",
            f"tokens per second, from {layer} timed here and now",
            soft_wrap=True,
        )
    for name, measured in page.measured.items():
        console.print()
        table = _table(f"{name}: predicted against measured", "predicted", "measured", "error")
        for phase in PHASES:
            table.add_row(phase, *_against(page.memory.of(phase), measured.phases[phase], shown))
        table.add_row("peak", *_against(page.memory.peak, measured.peak, shown))
        if name in page.times:
            table.add_row(
                "a step",
                *_against(
                    page.times[name].seconds, measured.seconds, lambda seconds: f"{seconds:.3g} s"
                ),
            )
        console.print(table)


def _calibration_lines(found: CalibrationForecast, device: str) -> list[str]:
    from npt.planning.memory import shown

    lines = ["not in it is what --init calibrated takes before the first step, a forecast:"]
    if found.device_bytes:
        lines.append(
            f"  {shown(found.device_bytes)} on {device} with the base, {shown(found.host_bytes)} of"
            " host memory,"
        )
    else:
        lines.append(f"  {shown(found.host_bytes)} of memory with the base,")
    lines.append(f"  {shown(found.disk_bytes)} of temporary disk")
    if found.device_bytes:
        lines.append(f"  {found.placement}")
    if found.seconds is not None:
        share = f"{found.eigendecomposition_seconds:.3g} s of them eigendecompositions"
        lines.append(f"  {found.seconds:.3g} s, {share}")
    return lines


def _print_verdict(page: Page, console: Any) -> None:
    from npt.planning.memory import shown

    peak = f"peak {shown(page.memory.peak)} in the {page.memory.phase}"
    if page.limit is None:
        console.print(peak, soft_wrap=True)
        return
    size = shown(page.limit)
    room = (
        f"--max_memory {size}"
        if page.workload.training.max_memory is not None
        else f"the {size} free on {page.workload.device}"
    )
    console.print(
        f"{peak}; it {'fits' if page.fits else 'does not fit'} into {room}", soft_wrap=True
    )
    if page.fits:
        return
    for flag, less in page.remedies:
        console.print(f"  {flag} would: {shown(less)} with one sample at a time", soft_wrap=True)
    if not page.remedies:
        console.print(
            "  no single setting would; lower several, or take a smaller base", soft_wrap=True
        )


def _table(*headings: str) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=bool(index))
    return table


def _against(predicted: float, measured: float, text: Any) -> tuple[str, str, str]:
    return text(predicted), text(measured), f"{predicted / measured - 1:+.1%}"
