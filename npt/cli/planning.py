"""The page of `npt doctor --plan`: memory and time of a run before it starts, next to those of
the first steps with --measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from npt.cli.arguments import open_base, plain_table
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError
from npt.flags import build
from npt.planning.cards import UTILISATION, Card, find_card


@dataclass(frozen=True)
class CalibrationForecast:
    """The cost of --init calibrated before the first step.

    device_bytes: at its highest moment, the base included; 0 on a CPU. host_bytes: of memory, on a
    CPU the base included. placement: of matrices. seconds:
    in all, eigendecomposition_seconds among them; None if nothing was timed.
    """

    device_bytes: int
    host_bytes: int
    placement: str
    seconds: float | None
    eigendecomposition_seconds: float | None


@dataclass(frozen=True)
class Page:
    """A plan. memory: a `MemoryPlan`. limit: bytes, None if unknown. remedies: settings that would
    fit. times: `StepTime` by strategy. measured: `Measured` by strategy, if it was run. card: that
    is planned for, if it need not be here.
    """

    name: str
    workload: Any
    memory: Any
    limit: int | None
    remedies: list[tuple[str, int]]
    times: dict[str, Any]
    measured: dict[str, Any]
    calibration: CalibrationForecast | None = None
    card: Card | None = None

    @property
    def fits(self) -> bool:
        start = 0 if self.card is None else self.start
        return self.limit is None or max(self.memory.peak, start) <= self.limit

    @property
    def start(self) -> int:
        """Bytes on a card before the first step: of the base, or of the calibrated start."""
        start = 0 if self.calibration is None else self.calibration.device_bytes
        return max(self.memory.terms[0].bytes, start)

    @property
    def hours(self) -> float | None:
        """Of the planned steps on the card, of 1,000 if their number is open; without the start."""
        if self.card is None:
            return None
        from npt.planning.flops import training_flops

        w, per_token = self.workload, 0.0
        for name, share in w.training.stage_shares:
            config = w.stages[name]
            per_token += share * training_flops(
                w.shape,
                w.length,
                w.form,
                name,
                own_teacher=w.teacher is not None,
                logits=float(bool(config.logit_kl_weight)),
                checkpointing=config.gradient_checkpointing,
            )
        speed = UTILISATION * self.card.tflops * 1e12
        return per_token * self.tokens * self.steps / speed / 3600

    @property
    def steps(self) -> int:
        """That the hours are of."""
        return self.workload.training.max_steps or 1000

    @property
    def tokens(self) -> int:
        """Tokens of a window."""
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
            "gpu": None if self.card is None else self.card._asdict(),
            "start_bytes": None if self.card is None else self.start,
            "hours": self.hours,
            "fits": self.fits,
            "remedies": [{"setting": flag, "peak_bytes": peak} for flag, peak in self.remedies],
            "time": {
                name: {**t.as_dict(), "tokens_per_second": self.tokens / t.seconds}
                for name, t in self.times.items()
            },
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "measured": {
                name: {**m.as_dict(), "errors": self._errors(name, m)}
                for name, m in self.measured.items()
            },
        }

    def _errors(self, strategy: str, measured: Any) -> dict[str, float]:
        """Relative errors of the prediction."""
        found = {"peak_bytes": self.memory.peak / measured.peak - 1}
        for phase, size in measured.phases.items():
            found[phase] = self.memory.of(phase) / size - 1
        if strategy in self.times:
            found["seconds"] = self.times[strategy].seconds / measured.seconds - 1
        return found


def forecast_calibration(
    workload: Any, base: int, limit: int | None, trial: bool
) -> CalibrationForecast:
    """Forecast the calibrated start of a workload.

    Args:
        workload: a `Workload`.
        base: bytes of the base.
        limit: bytes of the device, None if unknown.
        trial: time a product and an eigendecomposition.
    """
    from npt.adapters.fit import resolve_layers
    from npt.base.quantization_error import fp32_products
    from npt.calibration.plan import plan

    w, c, device = workload, workload.training, workload.device
    work = plan(
        w.config,
        resolve_layers(w.adapter.layers, w.config.num_hidden_layers),
        c.calibration_tokens,
        batch=(c.batch_size, w.length),
    )
    on_gpu = device.type == "cuda"
    free = max(0, (limit or 0) - base) if on_gpu else 0
    placement = work.place(device, free)
    seconds = None
    if trial:
        with fp32_products("highest"):
            seconds = work.seconds(device, placement)
    return CalibrationForecast(
        base + work.peak(device, placement) if on_gpu else 0,
        work.ram(device, placement) + (0 if on_gpu else base),
        str(placement),
        None if seconds is None else seconds.total,
        None if seconds is None else seconds.factorisations,
    )


def make_plan(given: Mapping[str, Any], console: Any) -> Page:
    """Plan a run by its flags, time one layer, and with --measure run a few steps.

    Raises:
        ConfigError: settings that cannot work together.
        ModelError: no such model.
    """
    import torch

    from npt.planning.memory import available
    from npt.planning.plan import Planner, remedies
    from npt.planning.timing import predict_time

    card = None if given.get("gpu") is None else find_card(given["gpu"])
    if card is not None and given["measure"]:
        raise ConfigError(
            "--measure runs steps on the device that is here, --gpu plans for one that need not be;"
            " drop one of the two"
        )
    name, workload = _workload(given)
    training = workload.training
    precision = given.get("matmul_precision", "auto")
    # on a card with TF32 it takes that, and without TF32 the settings are the same
    if precision == "auto":
        precision = "high" if workload.device.type == "cuda" else "highest"
    torch.set_float32_matmul_precision(precision)
    with console.status("counting the memory of a few layers"):
        planner = Planner(workload)
        limit = available(workload.device) if card is None else card.bytes
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
        del planner  # no fake model may be alive when memory is measured
    trial = not given["no_trial"] and card is None
    calibration = None
    if workload.adapter.init == "calibrated":
        calibration = forecast_calibration(workload, base, limit, trial)
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
    return Page(name, workload, memory, limit, found, times, measured, calibration, card)


def _workload(given: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the model's name and the workload to plan."""
    import torch

    from npt.adapters.fit import check_fit
    from npt.base.load import read_config
    from npt.calibration.calibrate import check_calibration
    from npt.planning.shape import llama_config, parse_shape, shape_of
    from npt.planning.workload import Workload
    from npt.train.run_checks import check_trainable

    base, adapter, data, training = (
        build(cls, given) for cls in (BaseConfig, NPTConfig, DataConfig, TrainConfig)
    )
    if (
        given.get("gpu") is not None and given["shape"] is None
    ):  # the hub is not asked for a known one
        given = {**given, "shape": shape_of(base.model_name)}
        given.pop("model_name", None)
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
            "--device is cuda, but there is no GPU here; --gpu plans for one that is not"
        )
    device = "cuda" if given.get("gpu") is not None else given["device"]
    device = None if device is None else torch.device(device)
    return name, Workload.of(
        base, config, adapter, training, data.max_length, device, stored=stored
    )


def _measured(given: Mapping[str, Any], workload: Any, memory: Any) -> dict[str, Any]:
    """Run a few steps on the real base, or for --shape on random weights: neither time nor memory
    depends on them.
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
        where: dict[str, Any] = {
            "device": workload.device,
            "attn_implementation": base.attn_implementation,
        }
        model, _ = open_base(base, **where)
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
        for name, config in workload.stages.items()
    }


def print_page(page: Page, console: Any) -> None:
    """Print the page for a terminal of 80 columns."""
    from npt.planning.memory import PHASES, shown

    w, c, memory = page.workload, page.workload.training, page.memory
    stored = "unquantised" if w.quantization is None else w.quantization.upper()
    shape = w.shape
    console.say(
        f"{page.name}: L {shape.layers}, D {shape.hidden}, F {shape.ffn}, V {shape.vocab:,},"
        f" {stored}, on {w.device if page.card is None else f'a card of {page.card.gib} GiB'}",
        f"rank {max(w.ranks)} on {w.depth.converted} layers, {' then '.join(w.stages)}; a step of"
        f" {c.gradient_accumulation_steps} x {c.batch_size} samples of {w.length:,} tokens",
    )
    if w.adapter.init == "random":
        console.say(
            "from a random start; if flags are silent the start is calibrated, as with",
            "--init calibrated --strategy end_to_end --logit_kl_weight 1.0",
        )
    if w.approximate:
        console.say(
            "ranks are planned as if they were even; the calibration gives as many to the layers"
            " that are worth most"
        )
    if memory.samples_at_once < c.batch_size:
        console.say(
            f"{memory.samples_at_once} of {c.batch_size} samples of a micro-batch are computed at"
            " once"
        )
    rows: dict[str, dict[str, int]] = {}
    for term in memory.terms:
        rows.setdefault(term.name, {}).update(dict.fromkeys(term.phases, term.bytes))
    table = plain_table("memory", *PHASES)
    for name, sizes in rows.items():
        table.add_row(name, *(shown(sizes[phase]) if phase in sizes else "" for phase in PHASES))
    table.add_section()
    table.add_row("together", *(shown(memory.of(phase)) for phase in PHASES))
    console.print()
    console.print(table)
    console.say(*_verdict(page))
    if page.card is not None:
        console.say(*_card_lines(page, page.card))
    elif page.calibration is not None:
        console.say(*_calibration_lines(page.calibration, str(w.device)))
    for name, time in page.times.items():
        table = plain_table(f"time of a step, {name}", "seconds")
        for part, seconds in time.parts.items():
            table.add_row(part, f"{seconds:.3g}")
        table.add_section()
        table.add_row("together", f"{time.seconds:.3g}")
        console.print()
        console.print(table)
        part = "" if time.narrowed == 1 else f" of 1/{time.narrowed} of the width"
        speed = page.tokens / time.seconds
        rate = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
        console.say(f"{rate} tokens per second, from one layer{part} timed here and now")
    for name, measured in page.measured.items():
        table = plain_table(f"{name}: predicted against measured", "predicted", "measured", "error")
        for phase in PHASES:
            table.add_row(phase, *_against(memory.of(phase), measured.phases[phase], shown))
        table.add_row("peak", *_against(memory.peak, measured.peak, shown))
        if name in page.times:
            predicted = page.times[name].seconds
            table.add_row("a step", *_against(predicted, measured.seconds, "{:.3g} s".format))
        console.print()
        console.print(table)


def _calibration_lines(found: CalibrationForecast, device: str) -> list[str]:
    from npt.planning.memory import shown

    lines = ["not in it is the cost of --init calibrated before the first step, a forecast:"]
    host = shown(found.host_bytes)
    if found.device_bytes:
        lines.append(
            f"  {shown(found.device_bytes)} on {device} with the base, {host} of host memory"
        )
    else:
        lines.append(f"  {host} of memory with the base")
    if found.device_bytes:
        lines.append(f"  {found.placement}")
    if found.seconds is not None:
        share = f"{found.eigendecomposition_seconds:.3g} s of them eigendecompositions"
        lines.append(f"  {found.seconds:.3g} s, {share}")
    return lines


def _verdict(page: Page) -> list[str]:
    from npt.planning.memory import shown

    peak = f"peak {shown(page.memory.peak)} in the {page.memory.phase}"
    if page.limit is None:
        return [peak]
    size = shown(page.limit)
    room = f"the {size} free on {page.workload.device}"
    if page.card is not None:
        room = f"the {size} that CUDA leaves of {page.card.gib} GiB"
    if page.workload.training.max_memory is not None:
        room = f"--max_memory {size}"
    lines = [f"{peak}; it {'fits' if page.fits else 'does not fit'} into {room}"]
    if not page.fits:
        lines += [
            f"  {flag} would: {shown(less)} with one sample at a time"
            for flag, less in page.remedies
        ] or ["  no single setting would; lower several, or take a smaller base"]
    return lines


def _card_lines(page: Page, card: Card) -> list[str]:
    start, training = (size / 2**30 for size in (page.start, page.memory.peak))
    return [
        f"start {start:.2f} GiB, training {training:.2f} GiB, of {card.gib} GiB",
        f"{page.hours:.2g} hours for {page.steps:,} steps after the start, at {UTILISATION:.0%} of"
        f" the {card.tflops:g} TFLOP/s of {card.name}: assumed, not measured",
    ]


def _against(predicted: float, measured: float, text: Any) -> tuple[str, str, str]:
    return text(predicted), text(measured), f"{predicted / measured - 1:+.1%}"
