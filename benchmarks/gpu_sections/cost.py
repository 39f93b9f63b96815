"""Sections 8 to 12: memory and its plan, cost of the guards, speed, evaluation, generation."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import npt
from faults.runs import NoTokenizer
from gpu_sections.models import base_of, full_batch
from gpu_sections.runner import Bench, Findings, Section
from npt.adapters.converted import adapter_parameters
from npt.batch import Batch, Sample
from npt.console import silent_console
from npt.device import wait_for
from npt.distill.local import BatchSums
from npt.distill.strategies import STRATEGIES
from npt.doctor.measure import measure_window
from npt.doctor.plan import Workload, shown
from npt.doctor.shape import SHAPES, llama_config
from npt.errors import is_out_of_memory
from npt.evaluation.greedy import continue_greedily

PLAN_TOLERANCE = 0.15
"""Allowed error of a predicted peak, as in the tests on the CPU. The plan does not know the
workspace of kernels.
"""


def check_memory(bench: Bench, findings: Findings) -> None:
    """Compare planned with measured memory, and train through an OOM."""
    _against_plan(bench, findings)
    _out_of_memory(bench, findings)


def _against_plan(bench: Bench, findings: Findings) -> None:
    length = bench.pick(64, 1024)
    config = llama_config(SHAPES[bench.pick("embedded", "llama-3.2-1b")], length)
    lines = [f"Peak memory of a step, 2 rows of {length:,} tokens:", ""]
    lines += ["| strategy | predicted | measured | error |", "|---|---|---|---|"]
    for strategy in bench.pick(("local",), tuple(STRATEGIES)):
        training = npt.TrainConfig(strategy=strategy, batch_size=2, eval_samples=2)
        adapter = npt.NPTConfig(rank=16, layers="upper_half", init="random")
        plan = Workload(
            config, adapter, training, length, "nf4", torch.bfloat16, device=bench.device
        ).plan()
        model = base_of(bench, "llama-3.2-1b", length)
        npt.attach(model, adapter)
        measured, _ = measure_window(model, training, 2, length)
        predicted = plan.of("micro-batch", "step")
        error = predicted / measured - 1
        sizes = shown(predicted), shown(measured)
        lines.append(f"| {strategy} | {' | '.join(sizes)} | {error:+.1%} |")
        told = f"{sizes[0]} predicted, {sizes[1]} measured, {error:+.1%}"
        findings.check(f"{strategy}: plan", abs(error) <= PLAN_TOLERANCE, told)
        findings.figures[f"{strategy}: plan error"] = error
        del model
    findings.tables.append("\n".join(lines))


def _out_of_memory(bench: Bench, findings: Findings) -> None:
    """Train where eight samples at once do not fit and four do. On a GPU a memory limit of this
    process forces it, elsewhere a strategy that raises the error.
    """
    length, rows = bench.pick(32, 2048), 8  # on a GPU the rows take most of the memory
    # with this vocabulary the logits take less than the layers
    model = base_of(bench, "cpu-0.2b", length, vocab=2048)
    npt.attach(model, npt.NPTConfig(rank=8, layers="upper_half"))
    limit = None
    if bench.cuda:
        config = npt.TrainConfig()
        peaks = {}
        gc.collect()  # otherwise an earlier model counts in the peaks but not at the limit
        for count in (rows // 2, rows):
            batch = full_batch(count, length, model.config.vocab_size, bench.device)
            STRATEGIES["local"](model, batch, config)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(bench.device)
            STRATEGIES["local"](model, batch, config)
            torch.cuda.synchronize(bench.device)
            # allocated, not reserved: at its limit the allocator returns unused memory
            peaks[count] = torch.cuda.max_memory_allocated(bench.device)
        for parameter in adapter_parameters(model).values():
            parameter.grad = None
        findings.figures["allocated bytes by samples at once"] = peaks
        limit = (peaks[rows // 2] + peaks[rows]) // 2
    with _little_memory(bench, limit):
        folder = _trained(model, bench, rows, length)
    events = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    lacking = [
        event for event in events if event["event"] == "out_of_memory" and "samples" in event
    ]
    findings.check("memory ran out", bool(lacking), "" if lacking else f"at a limit of {limit}")
    if lacking:
        last = lacking[-1]["samples_at_once"]
        findings.check(
            "halved until it fits", last < rows, f"{rows} samples, finally {last} at once"
        )
    steps = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    findings.check("all steps taken", len(steps) == 3, f"{len(steps)} of 3")
    if not bench.cuda:
        findings.notes.append("OOM is simulated without CUDA")


@contextmanager
def _little_memory(bench: Bench, limit: int | None) -> Iterator[None]:
    """Limit the GPU memory of this process to so many bytes."""
    if limit is None:
        yield
        return
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(bench.device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total, bench.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, bench.device)


def _trained(model: Any, bench: Bench, rows: int, length: int) -> Path:
    """Train three steps; return the run folder."""
    ids = torch.randint(
        model.config.vocab_size, (3 * rows + 2, length), generator=torch.Generator().manual_seed(0)
    ).tolist()
    config = npt.TrainConfig(
        batch_size=rows,
        max_steps=3,
        log_steps=1,
        eval_samples=1,
        smoke_test=False,
        output_dir=str(bench.folder / "out_of_memory"),
    )
    trainer = npt.Trainer(
        model,
        NoTokenizer(),
        [{"input_ids": row} for row in ids[2:]],
        config,
        data_config=npt.DataConfig(max_length=length),
        eval_data=[{"input_ids": ids[0][:32]}],
        console=silent_console(),
    )
    if not bench.cuda:
        plain = trainer.strategy

        def lacking(model: Any, batch: Batch, config: Any) -> BatchSums:
            if len(batch.input_ids) > rows // 2:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB. (said by gpu_check.py)"
                )
            return plain(model, batch, config)

        trainer.strategy = lacking
    return trainer.train().folder


def measure_guards(bench: Bench, findings: Findings) -> None:
    """Run `benchmarks/guards.py` on the embedded model, and on one with steps long enough to
    measure.
    """
    import guards

    benches: dict[str, Callable[[], Any]] = {
        "embedded": lambda: guards.builtin_bench("tiny", 4, bench.pick(64, 256), 2, windows=2)
    }
    if not bench.small:
        benches["llama-3.2-1b"] = lambda: guards.random_bench(
            base_of(bench, "llama-3.2-1b", 2048), 1, 2048, 2
        )
    for name, make in benches.items():
        figures = guards.measure(make(), bench.pick(4, 16))
        findings.figures[name] = figures
        added = figures["added_synchronisations"]
        findings.check(f"{name}: no host wait added", added == 0, f"{added:g} a step")
        ratio = figures["ratio"]
        findings.notes.append(f"{name} {ratio:.3f}")
        if name != "embedded":
            findings.target("guarded / plain step", ratio <= 1.005, f"{ratio:.4f}, at most 1.005")


NAMES = ("local", "end_to_end", "two_model", "peft_lora_distill", "peft_lora_ce")


def measure_speed(bench: Bench, findings: Findings) -> None:
    """Run `benchmarks/speed.py` on both shapes at every precision. bf16 is 4-bit products in bf16
    and the rest in TF32, for NPT alone.
    """
    import speed
    from tables import speeds

    cases = bench.pick(
        (("embedded", "upper_half", 64),),
        (("llama-3.2-1b", "all", 2048), ("llama-3.1-8b", "upper_half", 2048)),
    )
    for shape, layers, length in cases:
        for precision in ("high", "highest", "bf16"):
            in_bf16, device = precision == "bf16", str(bench.device)
            torch.set_float32_matmul_precision("high" if in_bf16 else precision)
            setting = speed.Setting(shape, layers, 16, 1, length, device=device)
            names: tuple[str, ...] = NAMES
            if in_bf16:
                setting, names = replace(setting, compute_dtype="bf16"), NAMES[:2]
            try:
                figures = speed.measure(setting, names, 2, lambda line: None)
            except Exception as error:  # the rivals' bases do not fit on every GPU
                if not is_out_of_memory(error):
                    raise
                figures = None
            if figures is None:
                gc.collect()
                torch.cuda.empty_cache()
                findings.notes.append(f"{shape}, {precision}: the rivals run out of memory")
                figures = speed.measure(setting, NAMES[:2], 2, lambda line: None)
            findings.figures[f"{shape}, {precision}"] = figures
            findings.tables = speeds(findings.figures)
            losses = [row["loss"] for row in figures["runs"]]
            findings.check(f"{shape}, {precision}: finite losses", all(map(math.isfinite, losses)))
            _judge_speed(findings, f"{shape}, {precision}", figures)


def _judge_speed(findings: Findings, name: str, figures: dict[str, Any]) -> None:
    """Report the figures, and judge them against the targets of the 8B shape in TF32 and bf16."""
    ours = next((row for row in figures["runs"] if row["name"] == "local"), None)
    if ours is None:
        findings.target(f"{name}: local", False, "out of memory")
        return
    share = ours["roofline_share"]
    peak = shown(ours["peak_bytes"])
    note = f"{name}: {ours['tokens_per_second']:,.0f} tokens/s, {share:.0%} of roofline"
    wanted = f"at least 60% of {'bf16' if name.endswith('bf16') else 'TF32'} products"
    targets = [
        ("memory", ours["peak_bytes"] <= 10 * 2**30, f"{peak}, at most 10 GiB"),
        ("roofline", share >= 0.6, f"{share:.0%}, {wanted}"),
    ]
    if "speed_ratio" in ours:
        ratio, memory = ours["speed_ratio"]["median"], ours["memory_ratio"]
        note += f", {ratio:.2f}x two_model"
        targets += [
            ("speed", ratio >= 1.8, f"{ratio:.2f}x two_model, at least 1.8x"),
            ("memory of two_model", memory <= 0.55, f"{memory:.2f} of it, at most 0.55"),
        ]
    findings.notes.append(note)
    if name in ("llama-3.1-8b, high", "llama-3.1-8b, bf16"):
        for target in targets:
            findings.target(*target)


def measure_generation(bench: Bench, findings: Findings) -> None:
    """Measure evaluation and generation in tokens a second, and check what they return."""
    length, count, new = bench.pick(48, 512), bench.pick(4, 16), bench.pick(8, 64)
    model = base_of(bench, "llama-3.2-1b", length + new)
    npt.attach(model, npt.NPTConfig(rank=16, layers="upper_half"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (count, length), generator=generator).tolist()
    samples = [Sample(str(i), tuple(row)) for i, row in enumerate(ids)]
    npt.evaluate(model, None, samples[:4], batch_size=4)
    started = time.perf_counter()
    fidelity = npt.evaluate(model, None, samples, batch_size=4)
    wait_for(bench.device)
    evaluated = count * length / (time.perf_counter() - started)
    findings.check(
        "finite figures",
        math.isfinite(fidelity.student.kl) and abs(fidelity.teacher.kl) <= 1e-4,
        f"KL of the teacher {fidelity.teacher.kl:.2g}",
    )
    prompts = ids[:4]
    names = [str(i) for i in range(len(prompts))]
    continue_greedily(model, prompts, [2] * len(prompts), (), names)
    started = time.perf_counter()
    written = continue_greedily(model, prompts, [new] * len(prompts), (), names)
    generated = len(prompts) * new / (time.perf_counter() - started)
    findings.check("all tokens written", [len(row) for row in written] == [new] * len(prompts))
    torch.set_float32_matmul_precision("highest")
    view, read = npt.student_view(model), torch.tensor(prompts, device=bench.device)
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    text = view.generate(read, attention_mask=torch.ones_like(read), **settings)
    with torch.no_grad():
        logits = view(text[:, :-1], use_cache=False).logits[:, length - 1 :]
    short = logits.amax(dim=-1) - logits.gather(-1, text[:, length:, None])[..., 0]
    # with and without a cache, fp32 sums have different orders
    findings.below("generate: gap to the largest logit", float(short.max()), 1e-3)
    findings.figures |= {
        "evaluated_tokens_per_second": evaluated,
        "generated_tokens_per_second": generated,
    }
    findings.notes.append(f"{evaluated:,.0f} tokens/s evaluated, {generated:,.0f} generated")


MEMORY = Section(8, "memory: prediction and OOM", check_memory)
GUARDS = Section(9, "guarded / plain step time", measure_guards)
SPEED = Section(10, "speed and memory of a step", measure_speed)
GENERATION = Section(12, "evaluate and generate", measure_generation)
