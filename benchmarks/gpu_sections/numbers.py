"""Sections 1, 3, 4 and 6: the machine, and its results against those of the CPU and of fp64."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.cextension import lib as native
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import npt
import tables
from gpu_sections.models import base_of, embedded_student, small_batch
from gpu_sections.runner import Bench, Findings, Section
from npt.adapters.converted import adapter_parameters
from npt.adapters.layer import attention_output
from npt.adapters.stream import open_stream
from npt.base.linear import dense_weight, multiply, multiply_backward, product_weight
from npt.base.precision import settle_policy
from npt.batch import Batch, batch_from_tensors
from npt.device import wait_for
from npt.distill.strategies import STRATEGIES
from npt.doctor.measure import peak_bytes
from npt.doctor.plan import shown
from random_base import STD

SMI = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")


def machine(device: torch.device) -> dict[str, Any]:
    """Return the GPU and the library versions."""
    about: dict[str, Any] = {"device": "cpu", "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "memory": shown(properties.total_memory),
            "capability": f"{properties.major}.{properties.minor}",
            "gpus": torch.cuda.device_count(),
        }
    for name in ("torch", "transformers", "bitsandbytes", "accelerate", "peft", "triton"):
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            about[name] = None
    return about


def _smi() -> dict[str, str]:
    """Return nvidia-smi's values for the first GPU; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    return (
        dict(zip(SMI, values, strict=True))
        if answer.returncode == 0 and len(values) == len(SMI)
        else {}
    )


def describe_machine(bench: Bench, findings: Findings) -> None:
    """Report GPU and libraries. Fail if torch does not see the GPU or bitsandbytes has no CUDA:
    elsewhere both are silent.
    """
    smi = _smi()
    findings.figures |= machine(bench.device) | {
        f"smi {name}": value for name, value in smi.items()
    }
    findings.check(
        "torch sees the GPU that nvidia-smi lists",
        bench.cuda or not smi,
        "torch.cuda.is_available() is False" if smi else "",
    )
    if bench.cuda:
        findings.check(
            "bitsandbytes is built for CUDA",
            getattr(native, "compiled_with_cuda", False),
            type(native).__name__,
        )
        total = torch.ones(1000, device=bench.device).sum()
        findings.check("the GPU computes a sum", total.item() == 1000.0)
    shown = {name: findings.figures.get(name) for name in ("memory", "smi driver_version", "torch")}
    label = {"smi driver_version": "driver"}
    findings.notes.append(", ".join(f"{label.get(n, n)} {v}" for n, v in shown.items() if v))


def _relative(value: Tensor, expected: Tensor) -> float:
    """Return the Frobenius norm of the difference over that of the expected tensor."""
    return float(
        torch.linalg.vector_norm(value.double() - expected.double())
        / torch.linalg.vector_norm(expected.double())
    )


def _packed_layer(shape: tuple[int, int], device: torch.device) -> Any:
    """Return a `Linear4bit` of [out, in] with random weights."""
    out_features, in_features = shape
    layer = bnb.nn.Linear4bit(
        in_features, out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    layer.support_avx512bf16_for_cpu = False
    weight = torch.randn(out_features, in_features, device=device).mul_(STD).cpu()
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    layer = layer.to(device)
    layer.weight.quant_state.dtype = torch.float32
    return layer.eval()


def check_products(bench: Bench, findings: Findings) -> None:
    """Compare `Linear4bit` and the products of training with fp64 products of the same
    dequantised weight, and a student with bf16 products with one in fp32.
    """
    shapes = bench.pick(
        ((256, 256), (704, 256), (256, 704), (64, 256)),
        ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096)),
    )
    rows = (1, 4, 8, 64, bench.pick(256, 2048))
    # fp32 and TF32: an eps of 6e-8 and 5e-4 for each product; thousands of errors average out.
    # bf16: up to 4e-3 for each operand and the result, 3e-3 in all
    limits = {"highest": 2e-5, "high": 2e-3, "bf16": 4e-3}
    cases: list[dict[str, Any]] = []
    worst: dict[tuple[str, str], float] = {}
    layers = {shape: _packed_layer(shape, bench.device) for shape in shapes}
    for shape, count in product(shapes, rows):
        layer = layers[shape]
        settle_policy(layer, torch.float32)
        exact = dense_weight(layer).double()
        x = torch.randn(count, shape[1], device=bench.device)
        grad = torch.randn(count, shape[0], device=bench.device)
        expected, expected_back = x.double() @ exact.t(), grad.double() @ exact
        for precision, limit in limits.items():
            torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")
            settle_policy(layer, torch.bfloat16 if precision == "bf16" else torch.float32)
            weight = product_weight(layer, x.dtype)
            with torch.no_grad():
                acts: dict[str, Callable[[], Tensor]] = {
                    "Linear4bit": partial(layer, x),
                    "product": partial(multiply, layer, weight, x),
                }
                errors = {name: _relative(act(), expected) for name, act in acts.items()}
                back = multiply_backward(layer, weight, grad)
                errors["backward"] = _relative(back, expected_back)
                seconds = {name: bench.seconds(act) for name, act in acts.items()}
            for name, error in errors.items():
                worst[name, precision] = max(worst.get((name, precision), 0.0), error)
                if not error <= limit:
                    where = f"{name}, {count} rows, {shape[0]}x{shape[1]}, {precision}"
                    findings.check(where, False, f"error {error:.2g} > {limit:.0e}")
            operations = 2 * count * shape[0] * shape[1] / 1e12
            case = {"out": shape[0], "in": shape[1], "rows": count, "precision": precision}
            case["errors"] = {name: errors[name] for name in acts}
            case["teraflops"] = {name: operations / seconds[name] for name in acts}
            cases.append(case)
    for (name, precision), error in worst.items():
        findings.below(f"{name}, {precision}, largest relative error", error, limits[precision])
        findings.figures[f"{name} error, {precision}"] = error
    findings.figures["products"] = cases
    findings.tables.append(f"TFLOP/s of 4-bit products:\n\n{tables.products(cases)}")
    torch.set_float32_matmul_precision("highest")
    _check_bf16_student(bench, findings)


def _check_bf16_student(bench: Bench, findings: Findings) -> None:
    """Compare loss and gradients with 4-bit products in bf16 with those in fp32."""
    for strategy in STRATEGIES:
        (loss, expected), (other, gradients) = (
            _gradients(bench.device, strategy, "padded", bench.device, compute_dtype)
            for compute_dtype in ("fp32", "bf16")
        )
        # some fifty products of error 3e-3 add up in quadrature; the loss averages them
        findings.below(f"{strategy}, bf16: loss", abs(other / loss - 1), 5e-3)
        apart = max(_relative(gradients[name], value) for name, value in expected.items())
        findings.below(f"{strategy}, bf16: gradients", apart, 3e-2)
        findings.figures[f"{strategy}, bf16"] = {"loss": abs(other / loss - 1), "gradients": apart}


KINDS = ("no mask", "padded right", "padded left", "packed")


def _attention_batch(kind: str, length: int, vocab: int) -> Batch:
    """Return one row of `length` tokens. "padded": a quarter is padding. "packed": it holds two
    documents.
    """
    ids = torch.randint(3, vocab, (1, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if kind.startswith("padded"):
        quarter = (
            slice(length - length // 4, None) if kind == "padded right" else slice(0, length // 4)
        )
        mask[:, quarter] = 0
    batch = batch_from_tensors(ids, mask)
    if kind != "packed":
        return batch
    documents = (torch.arange(length) >= length // 3).long()[None]
    positions = torch.where(
        documents == 1, torch.arange(length) - (length // 3), torch.arange(length)
    )
    return replace(batch, documents=documents, position_ids=positions)


def check_attention(bench: Bench, findings: Findings) -> None:
    """Measure kernel, memory and time of a layer's attention, forward and backward, and check
    that padding changes no valid token.
    """
    lengths = bench.pick((64, 256), (2048, 8192))
    model = base_of(bench, "llama-3.1-8b", lengths[-1], layers=1, vocab=512)
    layer, kernels = model.model.layers[0], set[str]()
    heads = "tokens | mask | forward, ms | with backward, ms | peak memory | scores, if stored"
    lines = ["Attention of a layer, one row:", "", f"| {heads} |", "|---|---|---|---|---|---|"]
    for length in lengths:
        scores = 4 * model.config.num_attention_heads * length**2
        for kind in KINDS:
            batch = _attention_batch(kind, length, 512).to(bench.device)
            with torch.no_grad():
                stream = open_stream(model, batch)
            context, hidden = stream.context_of(layer), stream.hidden.detach()

            def forward(hidden: Tensor = hidden, context: dict[str, Any] = context) -> Tensor:
                with torch.no_grad():
                    return attention_output(layer, hidden, **context)

            def both(hidden: Tensor = hidden, context: dict[str, Any] = context) -> Tensor:
                own = hidden.clone().requires_grad_()
                attention_output(layer, own, **context).sum().backward()
                assert own.grad is not None
                return own.grad

            valid, gradient = stream.rows(forward()), stream.rows(both())
            name = f"{length} tokens, {kind}"
            finite = torch.isfinite(valid).all() and torch.isfinite(gradient).all()
            findings.check(f"{name}: finite", bool(finite))
            # causal: later tokens do not change earlier ones
            if kind == "padded right":
                alone = attention_of_valid(model, layer, batch)
                # fp32 sums over the same keys, in blocks of another size
                findings.below(f"{name}: error against no padding", _relative(valid, alone), 1e-5)
            elif kind == "no mask":
                torch.set_float32_matmul_precision("high")
                rounded = stream.rows(forward())
                findings.figures[f"{name}: under TF32"] = {
                    "kernel": _kernel(forward),
                    "seconds": bench.seconds(forward),
                }
                torch.set_float32_matmul_precision("highest")
                # TF32 and fp16 round the operands of four projections and attention to 11 bits
                findings.below(f"{name}: error under TF32", _relative(rounded, valid), 3e-3)
            kernel = _kernel(both)
            kernels.add(kernel)
            times = bench.seconds(forward), bench.seconds(both)
            peak = peak_bytes(both, bench.device) if bench.cuda else None
            findings.figures[f"{name}: kernel"] = kernel
            findings.figures[f"{name}: seconds"], findings.figures[f"{name}: peak"] = times, peak
            of_both = "" if peak is None else shown(peak)
            if peak is not None and length == lengths[-1]:
                # The math kernel holds at least the scores and their gradient, fp32 for every head.
                detail = f"peak {of_both} by {kernel}, the scores alone are {shown(scores)}"
                findings.check(f"{name}: memory", peak < scores / 2, detail)
            cells = [*(f"{1000 * spent:.3g}" for spent in times), of_both, shown(scores)]
            lines.append(f"| {length} | {kind} | {' | '.join(cells)} |".replace("|  |", "| |"))
    findings.tables.append("\n".join(lines))
    findings.notes.append(
        " and ".join(sorted(kernels)) + ("" if bench.cuda else "; memory needs CUDA")
    )


def attention_of_valid(model: Any, layer: Any, batch: Batch) -> Tensor:
    """Return [N, D], the attention of a padded row's valid tokens, computed without padding."""
    ids = batch.input_ids[batch.attention_mask.bool()][None].cpu()
    stream = open_stream(
        model, batch_from_tensors(ids, torch.ones_like(ids)).to(batch.input_ids.device)
    )
    with torch.no_grad():
        return stream.rows(attention_output(layer, stream.hidden, **stream.context_of(layer)))


def _kernel(act: Any) -> str:
    """Return torch's names of the attention kernels that a call runs."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        act()
    prefix = "aten::_scaled_dot_product_"
    names = {
        event.key.removeprefix(prefix)
        for event in profiler.key_averages()
        if event.key.startswith(prefix)
    }
    forward = sorted(name for name in names if not name.endswith("_backward"))
    return ", ".join(forward) or "none of torch's"


def compare_gradients(bench: Bench, findings: Findings) -> None:
    """Compare every strategy's loss and gradients on the GPU with those on the CPU, from the same
    4-bit codes.
    """
    bench.need_cuda()
    for strategy, kind in product(STRATEGIES, ("full", "padded", "packed")):
        # both devices use the codes that the CPU packed
        (loss, expected), (other, gradients) = (
            _gradients(device, strategy, kind, torch.device("cpu"))
            for device in (torch.device("cpu"), bench.device)
        )
        name = f"{strategy}, {kind}"
        # fp32 on both: kernels sum some hundred terms in different orders, through eight layers
        findings.below(f"{name}: loss", abs(other / loss - 1), 1e-4)
        findings.check(
            f"{name}: the same tensors have gradients", gradients.keys() == expected.keys()
        )
        apart = max(
            float((gradients[n] - g).abs().max() / g.abs().max())
            for n, g in expected.items()
            if n in gradients
        )
        findings.below(f"{name}: gradients", apart, 1e-3)
        findings.figures[name] = {"loss": abs(other / loss - 1), "gradients": apart}


def _gradients(
    device: torch.device, strategy: str, kind: str, loaded_on: torch.device, *compute_dtype: str
) -> tuple[float, dict[str, Tensor]]:
    """Return a student's mean loss on a small batch, and its gradients on the host."""
    model = embedded_student(loaded_on, *compute_dtype).to(device)
    config = npt.TrainConfig(strategy=strategy, regularization_lambda=0.3)
    sums = STRATEGIES[strategy](model, small_batch(kind).to(device), config)
    wait_for(device)
    parameters = adapter_parameters(model).items()
    gradients = {name: p.grad.cpu() for name, p in parameters if p.grad is not None}
    return float(sums.loss) / sums.tokens, gradients


MACHINE = Section(1, "driver, card, libraries", describe_machine)
PRODUCTS = Section(3, "4-bit products against fp64", check_products)
ATTENTION = Section(4, "attention: kernel, memory, time", check_attention)
GRADIENTS = Section(6, "loss and gradients against the CPU", compare_gradients)
