"""bitsandbytes' own Python for CUDA, over a library that computes on the host.

What a card would be asked goes through `bitsandbytes/backends/cuda/ops.py`: its checks, its choice
of kernels and its pointers. The stub below them reads and writes the memory that the pointers name,
with the arithmetic of the CPU's kernels, and notes the names.
"""

import ctypes
import importlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import bitsandbytes.cextension
import torch
from bitsandbytes import _ops
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Before = Callable[[], None]


class Library:
    """Functions of C by name; `before` is called before each, `called` has their names."""

    def __init__(self) -> None:
        self.before: Before = lambda: None
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            self.before()
            self.called.append(name)
            words = name.split("_")
            if name.startswith("cdequantize_blockwise_"):
                _dequantize(DTYPES[words[2]], words[3] if len(words) > 3 else None, *arguments)
            elif name.startswith("cgemm_4bit_") and words[2] in DTYPES:
                _gemm(DTYPES[words[2]], *arguments)
            else:
                raise NotImplementedError(name)

        setattr(self, name, call)
        return call


def at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """The numbers at an address of the host."""
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _dequantize(
    dtype: torch.dtype, kind: str | None, code: Any, a: int, absmax: int, out: int,
    blocksize: int, count: int, _stream: Any,
) -> None:  # fmt: skip
    scales, target = at(absmax, -(-count // blocksize), torch.float32), at(out, count, dtype)
    ops = torch.ops.bitsandbytes
    if kind is None:
        codes, packed = at(code, 256, torch.float32), at(a, count, torch.uint8)
        target.copy_(ops.dequantize_blockwise(packed, scales, codes, blocksize, dtype))
    else:
        packed = at(a, (count + 1) // 2, torch.uint8).view(-1, 1)
        target.copy_(ops.dequantize_4bit(packed, scales, blocksize, kind, [count], dtype).flatten())


def _gemm(
    dtype: torch.dtype, a: int, b: int, absmax: int, absmax_8bit: Any, absmax_code: Any,
    absmax_offset: Any, out: int, bias: Any, rows: int, outputs: int, inputs: int,
    blocksize: int, kind: int, _stream: Any,
) -> None:  # fmt: skip
    count, scales = inputs * outputs, absmax
    if absmax_8bit is not None:
        blocks = count // blocksize
        unpacked = torch.empty(blocks)
        outer = (absmax_code, absmax_8bit, absmax, unpacked.data_ptr(), 256, blocks, None)
        _dequantize(torch.float32, None, *outer)
        unpacked += at(absmax_offset, 1, torch.float32)
        scales = unpacked.data_ptr()
    weight = torch.empty(outputs, inputs, dtype=dtype)
    name = {1: "fp4", 2: "nf4"}[kind]
    _dequantize(dtype, name, None, b, scales, weight.data_ptr(), blocksize, count, None)
    added = None if bias is None else at(bias, outputs, dtype)
    x = at(a, rows * inputs, dtype).view(rows, inputs)
    at(out, rows * outputs, dtype).copy_(torch.nn.functional.linear(x, weight, added).flatten())


def load() -> tuple[Library, dict[str, Callable[..., Any]]]:
    """Return the stub, and bitsandbytes' functions for CUDA by operator; none is registered."""
    library, functions = Library(), dict[str, Callable[..., Any]]()

    def register(name: str, device: str) -> Callable[..., Any]:
        return lambda function: functions.setdefault(name, function)

    module = "bitsandbytes.backends.cuda.ops"
    with (
        mock.patch.object(bitsandbytes.cextension, "lib", library),
        mock.patch.object(_ops, "register_kernel", register),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
        mock.patch.dict(sys.modules),
    ):
        importlib.import_module(module)
    return library, functions
