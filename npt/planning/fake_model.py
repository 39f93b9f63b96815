"""Hollow models: all of a base but its numbers, so that what a call would take in memory can be
counted without taking it.

Tensors have shape, dtype and device and no storage (torch's fake tensors). The code that trains
runs on them as it is, autograd included, and a ledger follows which of its tensors would be alive
together. So the count cannot drift from the code, whatever that comes to keep or to free; and it
costs a fraction of a second for a layer of any size, on a machine that could never hold it.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations import replace_with_bnb_linear

from npt.adapters import fused
from npt.adapters.attach import adapter_parameters, attach
from npt.base.attention import SDPA
from npt.base.linear import quantized_linears
from npt.base.load import packing_config
from npt.base.precision import enforce_policy
from npt.base.random_base import DENSE
from npt.config import NPTConfig
from npt.data.batch import Batch, batch_from_tensors

BLOCK, NESTED_BLOCK = 64, 256
"""Values that share a scale in bitsandbytes' 4-bit code, and scales that share one of their own."""

_PACKED_PRODUCT = getattr(getattr(torch.ops.bitsandbytes, "gemm_4bit", None), "default", None)
"""The operator that multiplies rows with a packed weight and unpacks it inside. bitsandbytes before
0.50 has none: there the unpacked weight is a tensor like others."""

_DEVICE = torch.ops.prim.device.default


class Hollow:
    """A place in which tensors have no storage. Models and batches that it makes are used within
    `peak_of` alone.

    Args:
        device: that tensors claim to be on, by which operations choose their kernels. It has to
            exist.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def base(
        self,
        config: PreTrainedConfig,
        quantization: str | None,
        stored: torch.dtype,
        adapter: NPTConfig | None = None,
        *,
        upcast: bool = False,
        attn_implementation: str = "sdpa",
        compute_dtype: torch.dtype = torch.float32,
    ) -> Any:
        """A model as `load_base` would give it, with adapters attached where there is a
        configuration for them.

        Args:
            config: of a known family.
            quantization: nf4, fp4 or None.
            stored: dtype of what is not packed.
            adapter: of the adapters; their gradients are there as well.
            compute_dtype: of products of packed weights.
            upcast: compute in fp32 whatever it is stored in, as a packed base and an unquantised
                teacher do.
            attn_implementation: as in `load_base`; flex_attention, which compiles what it runs, is
                counted as sdpa.
        """
        with torch.device("meta"):
            attention = "eager" if attn_implementation == "eager" else SDPA
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=stored, attn_implementation=attention
            )
        if quantization is not None:
            replace_with_bnb_linear(
                model,
                modules_to_not_convert=list(DENSE),
                quantization_config=packing_config(quantization),
            )
        if adapter is not None:
            attach(model, adapter)
        with self._mode:
            self._fill(model, quantization)
            model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(self.device)
            if quantization is not None or upcast:
                enforce_policy(model, compute_dtype)
        model.eval()
        return model

    def batch(self, rows: int, length: int) -> Batch:
        """Full rows, every token of which is predicted."""
        ids = torch.zeros(rows, length, dtype=torch.int64)
        # which finds all that is found on the host
        batch = batch_from_tensors(ids, torch.ones_like(ids)).to(torch.device("cpu"))
        own = {f.name for f in fields(Batch)}

        def hollow(value: Any) -> Any:
            return self._empty(value.shape, value.dtype) if isinstance(value, Tensor) else value

        made = replace(batch, **{name: hollow(getattr(batch, name)) for name in own})
        vars(made).update(
            {name: hollow(value) for name, value in vars(batch).items() if name not in own}
        )
        return made

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of this shape."""
        return self._empty(shape, dtype)

    def peak_of(self, act: Callable[[], object]) -> int:
        """Bytes that `act` would have alive at its highest moment, beside what was there before."""
        with self._mode, _few_blocks(), Ledger() as ledger:
            act()
        return ledger.highest

    def _empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def _fill(self, model: Any, quantization: str | None) -> None:
        """A tensor without storage in the place of each one without device."""
        packed = {id(module.weight): module for _, module in quantized_linears(model)}
        made: dict[int, Any] = {}  # tied weights stay one
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    if id(parameter) in packed:
                        made[id(parameter)] = self._packed(packed[id(parameter)], str(quantization))
                    else:
                        empty = self._empty(parameter.shape, parameter.dtype)
                        made[id(parameter)] = nn.Parameter(
                            empty, requires_grad=parameter.requires_grad
                        )
                module._parameters[name] = made[id(parameter)]
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = self._empty(parameter.shape, parameter.dtype)

    def _packed(self, module: Any, quantization: str) -> Tensor:
        """A packed weight with its scales, as bitsandbytes keeps them."""
        shape = torch.Size((module.out_features, module.in_features))
        blocks = math.ceil(shape.numel() / BLOCK)
        nested = QuantState(
            absmax=self._empty((math.ceil(blocks / NESTED_BLOCK),), torch.float32),
            code=self._empty((256,), torch.float32),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        weight: Any = self._empty(((shape.numel() + 1) // 2, 1), torch.uint8)
        weight.quant_state = QuantState(
            absmax=self._empty((blocks,), torch.uint8),
            shape=shape,
            code=self._empty((16,), torch.float32),
            blocksize=BLOCK,
            quant_type=quantization,
            dtype=torch.float32,
            offset=self._empty((), torch.float32),
            state2=nested,
        )
        return weight


@contextmanager
def _few_blocks() -> Iterator[None]:
    """Within the context a layer's rows are taken in their first two blocks and the last alone: of
    hundreds, all between take the same.
    """
    every = fused.blocks

    def few(like: Tensor, rank: int) -> list[slice]:
        found = every(like, rank)
        return found if len(found) < 4 else [*found[:2], found[-1]]

    fused.blocks = few
    try:
        yield
    finally:
        fused.blocks = every


class Ledger(TorchDispatchMode):
    """Follows the bytes of tensors that are made within it, until they are freed. highest: of them
    at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.highest = self._live = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:  # every other call asks for it, and nothing is made
            asked = args[0]
            return (
                asked.fake_device
                if isinstance(asked, FakeTensor) and not asked.fake_mode.in_kernel_invocation
                else func(asked)
            )
        for leaf in tree_leaves((args, kwargs)):  # one that is not known yet was there before
            self._note(leaf, made=False)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._note(leaf, made=True)
        if func is _PACKED_PRODUCT:
            self.highest = max(self.highest, self._live + _unpacked(args))
        # inside it the gradient is multiplied with the output
        if func is torch.ops.aten._efficient_attention_backward.default:
            self.highest = max(self.highest, self._live + args[0].numel() * args[0].element_size())
        return out

    def _note(self, leaf: Any, made: bool) -> None:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            return
        storage = leaf.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if made else 0
        self._live += self._sizes[key]
        self.highest = max(self.highest, self._live)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self._live -= self._sizes.pop(key)


def _unpacked(arguments: tuple[Any, ...]) -> int:
    """What a product with a packed weight makes inside: the dense weight in the rows' dtype, and
    its scales in fp32.

    A GPU that has a kernel for so few rows makes neither; it is then counted too high, by one
    weight.
    """
    rows, _, shape = arguments[:3]
    return math.prod(shape) * rows.element_size() + math.prod(shape) // BLOCK * 4


def bytes_of(model: Any) -> int:
    """Of a hollow model: of its parameters, packed weights with their scales, and buffers; its
    gradients and adapters are left out.
    """
    own = (
        {id(parameter) for parameter in adapter_parameters(model).values()}
        if hasattr(model, "_npt_state")
        else set()
    )
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and id(tensor) not in own:
                tensors[id(tensor)] = tensor
                state = getattr(tensor, "quant_state", None)
                while state is not None:
                    parts = (state.absmax, state.code, state.offset)
                    tensors |= {id(part): part for part in parts if isinstance(part, Tensor)}
                    state = state.state2
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
