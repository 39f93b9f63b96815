"""Count the launches, moved bytes and operations of a training step on a GPU, without a GPU.

The step runs on tensors without data (torch's device `meta`), along the path that fp32 takes on
CUDA with TF32 allowed. The rules:

- an operator that returns a view or fresh memory costs nothing; any other is one launch and moves
  the bytes of the tensors that it reads and writes, each once;
- `addmm` onto a matrix first copies that matrix: one more launch, and its bytes twice;
- a 4-bit product is three launches that unpack (statistics, their offset, the weight) and one that
  multiplies;
- a kernel of NPT is one operator (npt::...).
- by the host, a micro-batch of `local` is launched as one CUDA graph (npt/distill/graphed.py), with
  copies of its tokens and of what comes out. The graph's kernels are launched by the device.

A launch takes the time of its arithmetic, at the speed measured on an H100 (`SPEEDS`), or of its
bytes at 3 TB/s, whichever is longer. A step takes at least 2.5 us a launch by the host. The
roofline share is the time of the arithmetic alone over that of the step.

    python benchmarks/step_cost.py --json benchmarks/results/step_cost.json --name "what changed"
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Params4bit
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

import npt
import npt.base.attention
from flop_count import formulas
from npt.adapters import trained
from npt.adapters.converted import adapter_parameters
from npt.base.attention import implementation_of
from npt.base.load import packing_config
from npt.base.precision import enforce_policy, fp32_products
from npt.console import put
from npt.distill.graphed import GraphedStep
from npt.distill.strategies import STRATEGIES
from npt.doctor.shape import SHAPES, llama_config
from npt.files import write_json
from npt.packed import quantized_linears
from speed_runs import Setting, make_batch

SETTING = Setting("llama-3.1-8b", "upper_half", 16, 1, 2048, device="meta")
NAMES = ("local", "end_to_end")

SPEEDS = {"product": 393e12, "efficient_attention": 38e12, "efficient_attention_backward": 38e12}
SPEEDS |= {"flash_attention": 200e12}
"""Operations a second on an H100, as measured: TF32 products, attention in fp32, and in fp16."""
BANDWIDTH, LAUNCH = 3e12, 2.5e-6

FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach"}
FREE |= {"_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "record_stream"}

PICKS = {"embedding", "index_select", "gather"}

aten = torch.ops.aten


class _Norm(torch.autograd.Function):
    """Stand-in for RMSNorm's CUDA kernels: one forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.saved_tensors[0], None, None, None


class Cost(TorchDispatchMode):
    """Count the operators that run inside it.

    Attributes:
        launches: by operator.
        moved: bytes, by operator.
        flops: of all products.
        seconds: predicted, without the minimum for each launch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.moved = Counter[str](), Counter[str]()
        self.flops, self.seconds = 0, 0.0
        self._formulas = FlopCounterMode(display=False, custom_mapping=formulas()).flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        name = packet.__name__
        if func.is_view or name in FREE:
            return out
        formula = self._formulas.get(packet)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
        tensors = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
        if name == "gemm_4bit":
            self._unpack(args[1], args[2], out.dtype)
            weight = args[2][0] * args[2][1] * out.element_size()
            self.add("mm", flops, _bytes(args[0]) + _bytes(out) + weight)
            return out
        if name in PICKS:  # reads one row for each row it writes
            tensors = {0: out, 1: out}
        if name == "addmm" and args[0].dim() == 2:
            self.add("copy of addmm", 0, 2 * _bytes(args[0]))
            tensors.pop(id(args[0]), None)
        self.add(name, flops, sum(map(_bytes, tensors.values())))
        return out

    def add(self, name: str, flops: int, moved: int) -> None:
        """Count a launch."""
        kind = next((kind for kind in reversed(SPEEDS) if kind in name), "product")
        self.launches[name] += 1
        self.moved[name] += moved
        self.flops += flops
        self.seconds += max(flops / SPEEDS[kind], moved / BANDWIDTH)

    def _unpack(self, packed: Tensor, shape: list[int], dtype: torch.dtype) -> None:
        count = shape[0] * shape[1]
        self.add("dequantize_blockwise", 0, count // 64 * 5)
        self.add("add_", 0, count // 64 * 8)
        self.add("dequantize_4bit", 0, _bytes(packed) + count // 64 * 4 + count * dtype.itemsize)


def _bytes(tensor: Tensor) -> int:
    """Return a tensor's bytes in memory, with an expanded dimension counted once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, step in steps if step)


def _attention(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    """Call the attention kernel that CUDA uses for such tensors."""
    causal, scale, bias = named["is_causal"], named["scale"], named.get("attn_mask")
    if query.dtype == torch.float32:
        kernel = aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, bias, False, 0.0, causal, scale=scale)[0]
    assert bias is None and query.dtype == torch.float16
    kernel = aten._scaled_dot_product_flash_attention
    return kernel(query, key, value, 0.0, causal, scale=scale)[0]


def _own_kernels(cost: Cost) -> Any:
    """Return npt/adapters/kernels.py with counted launches; it works without Triton."""

    class Kernel:
        def __init__(self, function: Any):
            self.name, self.parameters = function.__name__, signature(function).parameters

        def __getitem__(self, grid: Any) -> Any:
            return self.launch

        def launch(self, *arguments: Any, RANK: int, **_: Any) -> None:
            given = dict(zip(self.parameters, arguments, strict=False))
            tensors = {id(t): t for t in arguments if isinstance(t, Tensor)}.values()
            size = given["width"], given["rank"]
            terms = sum(t.shape == size for t in tensors) if RANK else 0
            flops = terms * 2 * given["count"] * math.prod(size)
            cost.add(f"triton {self.name}", flops, sum(map(_bytes, tensors)))

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    vars(triton).update(
        jit=Kernel,
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
        language=language,
    )
    path = Path(npt.__file__).parent / "adapters" / "kernels.py"
    spec = spec_from_file_location("counted_kernels", path)
    assert spec is not None and spec.loader is not None
    kernels: Any = module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        spec.loader.exec_module(kernels)
    return kernels


@contextmanager
def as_on_cuda(cost: Cost) -> Iterator[None]:
    """Make tensors without data take the paths of CUDA, with TF32 allowed."""
    fakes: list[tuple[str, Any]] = [
        ("_on_cuda_in_fp32", lambda *tensors: all(t.dtype == torch.float32 for t in tensors)),
        ("_has_backward", lambda query, causal: True),
        ("_takes_fp16", lambda query, key, causal: True),
        ("scaled_dot_product_attention", _attention),
    ]
    with ExitStack() as stack:
        stack.enter_context(fp32_products("high"))
        # autocast does not support meta tensors
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda kind: False))
        stack.enter_context(mock.patch.object(torch, "autocast", lambda *_, **__: nullcontext()))
        stack.enter_context(mock.patch.object(functional, "rms_norm", _Norm.apply))
        kernels = _own_kernels(cost)
        backend = lambda z: kernels.TritonModulation  # noqa: E731
        stack.enter_context(mock.patch.object(trained, "_backend", backend))
        for name, fake in fakes:
            stack.enter_context(mock.patch.object(npt.base.attention, name, fake))
        yield


def empty_base(setting: Setting) -> Any:
    """Return a 4-bit base of a shape, without data."""
    config = llama_config(SHAPES[setting.shape], setting.length)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.bfloat16,
            attn_implementation=implementation_of("sdpa"),
        )
    quantization = packing_config("nf4")
    replace_with_bnb_linear(
        model, modules_to_not_convert=["lm_head"], quantization_config=quantization
    )
    for _, module in quantized_linears(model):
        module.weight = _packed(module)
    enforce_policy(model)
    return model.requires_grad_(False).eval()


def _packed(module: Any) -> Params4bit:
    """Return a 4-bit weight without data, with double-quantised statistics."""
    shape = torch.Size((module.out_features, module.in_features))
    blocks = shape.numel() // 64

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    common = {"quant_type": "nf4", "dtype": torch.float32}
    inner = QuantState(
        empty(-(-blocks // 256)), code=empty(256), blocksize=256, dtype=torch.float32
    )
    state = QuantState(
        empty(blocks, dtype=torch.uint8),
        shape=shape,
        code=empty(16),
        blocksize=64,
        offset=empty(),
        state2=inner,
        **common,
    )
    packed: Any = Params4bit(
        empty(shape.numel() // 2, 1, dtype=torch.uint8),
        False,
        quant_state=state,
        bnb_quantized=True,
    )
    return packed


def step_cost(strategy: str, setting: Setting = SETTING) -> tuple[Cost, int]:
    """Count forward and backward of a micro-batch, without the optimizer step; also return the
    launches by the host.
    """
    cost = Cost()
    with as_on_cuda(cost):
        model, config = empty_base(setting), npt.TrainConfig(strategy=strategy)
        npt.attach(model, setting.form)
        batch = make_batch(setting)
        with cost:
            sums = STRATEGIES[strategy](model, batch, config)
    if strategy != "local":
        return cost, cost.launches.total()
    by_host = Cost()
    results = [*sums[:5], *(p.grad for p in adapter_parameters(model).values())]
    replay = partial(by_host.add, "graph", 0, 0)
    step = GraphedStep(graph=(None, batch, results, replay))
    with by_host:
        step.compute(None, batch, lambda _: [])
    return cost, by_host.launches.total()


def figures(strategy: str, setting: Setting = SETTING) -> dict[str, Any]:
    """Return the counts of a step and its predicted time."""
    cost, by_host = step_cost(strategy, setting)
    seconds = max(cost.seconds, by_host * LAUNCH)
    return {
        "launches": cost.launches.total(),
        "launches_by_host": by_host,
        "gigabytes": round(cost.moved.total() / 1e9, 1),
        "teraflops": round(cost.flops / 1e12, 2),
        "milliseconds": round(1e3 * seconds, 1),
        "roofline_share": round(cost.flops / SPEEDS["product"] / seconds, 3),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file with a list of counts to add to")
    parser.add_argument(
        "--name", default="now", help="name of the row; an existing row is replaced"
    )
    args = parser.parse_args(argv)
    counts = {"name": args.name, **{name: figures(name) for name in NAMES}}
    put(json.dumps(counts, indent=2))
    if args.json is not None:
        found = json.loads(args.json.read_text(encoding="utf-8")) if args.json.is_file() else []
        found = [step for step in found if step["name"] != args.name] + [counts]
        write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
