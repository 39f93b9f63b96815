"""Section 2: the kernels that train a converted layer, against its plain form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import npt
from gpu_sections.models import base_of, full_batch
from gpu_sections.runner import Bench, Findings, Section
from npt.adapters.converted import adapter_parameters
from npt.distill.strategies import STRATEGIES
from npt.hooks import unfused
from tables import PRECISIONS


def check_layer(bench: Bench, findings: Findings) -> None:
    """Compare loss and gradients of one layer of the 8B shape, computed by the kernels that train
    it (Triton's if installed) and operation by operation; count launches and time of both.
    """
    length = bench.pick(64, 2048)
    model = base_of(bench, "llama-3.1-8b", length, layers=2, vocab=512)
    npt.attach(model, npt.NPTConfig(rank=16, layers="upper_half", additive_scale=1.0), seed=0)
    parameters = adapter_parameters(model)
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.values():  # so that no term is zero, as it is at a random start
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(bench.device)
    batch = full_batch(1, length, 512, bench.device)
    config = npt.TrainConfig(regularization_lambda=0.3)

    def step() -> list[Tensor]:
        for parameter in parameters.values():
            parameter.grad = None
        sums = STRATEGIES["local"](model, batch, config)
        return [sums.loss, *(p.grad for p in parameters.values() if p.grad is not None)]

    lines = [
        f"Forward and backward of a layer, {length:,} tokens; error relative to plain torch:",
        "",
    ]
    lines += ["| precision | code | launches | ms | error |", "|---|---|---|---|---|"]
    # fp32: thousands of terms summed in other blocks. TF32: both round, in different places
    for precision, limit in (("highest", 1e-4), ("high", 5e-3)):
        torch.set_float32_matmul_precision(precision)
        expected: list[Tensor] = []
        for form in ("plain", "trained"):
            with unfused() if form == "plain" else contextlib.nullcontext():
                found = [tensor.double() for tensor in step()]
                seconds, launches = bench.seconds(step), _launches(step) if bench.cuda else 0
            expected = expected or found
            pairs = zip(found, expected, strict=True)
            error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
            code = "plain torch" if form == "plain" else "NPT"
            cells = [PRECISIONS[precision], code, f"{launches or ''}", f"{1000 * seconds:.3g}"]
            lines.append(f"| {' | '.join(cells)} | {error:.1e} |")
            name = f"{form}, {precision}"
            findings.figures[name] = {"launches": launches, "seconds": seconds, "error": error}
            if form == "trained":
                findings.below(f"{precision}: error against the plain form", error, limit)
    findings.tables.append("\n".join(lines))
    if not bench.cuda:
        findings.notes.append("Triton's kernels need CUDA")
    elif find_spec("triton") is None:
        findings.notes.append("Triton is not installed, so torch's kernels are compared")


def _launches(act: Callable[[], Any]) -> int:
    """Return how many kernels and copies a call starts on the GPU."""
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        act()
        torch.cuda.synchronize()
    events = profiler.key_averages()
    return sum(event.count for event in events if event.device_type == DeviceType.CUDA)


LAYER = Section(2, "layer kernels against plain torch", check_layer)
