"""A fake device: models and batches without numbers, to count the memory of a call without taking
it.

Tensors have shape, dtype and device and no storage (torch's fake tensors). The code that trains
runs on them as it is, autograd included, and a ledger follows which of its tensors are alive
together. So the count cannot drift from the code, and it costs a fraction of a second for a layer
of any size, on a machine that could never hold it.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from npt.adapters.attach import attach
from npt.adapters.converted import adapter_parameters
from npt.adapters.fused import few_blocks
from npt.base.attention import SDPA
from npt.base.linear import quantized_linears
from npt.base.precision import enforce_policy
from npt.base.random_base import meta_base
from npt.config import NPTConfig
from npt.data.batch import Batch, batch_from_tensors

BLOCK, NESTED_BLOCK = 64, 256
"""Values that share a scale in bitsandbytes' 4-bit code, and scales that share one of their own."""

_PACKED_PRODUCT = getattr(getattr(torch.ops.bitsandbytes, "gemm_4bit", None), "default", None)
"""The operator that multiplies rows with a packed weight and unpacks it inside. bitsandbytes before
0.50 has none: there the unpacked weight is a tensor like others."""

_ATTENTION_BACKWARD = torch.ops.aten._efficient_attention_backward.default
_DEVICE = torch.ops.prim.device.default


class FakeDevice:
    """A device whose tensors have no storage. Use its models and batches within `peak_of` alone.

    Operations choose their kernels by the device that tensors claim to be on. It must exist.
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
        """Return a model as `load_base` would give it, with adapters and their gradients if they
        are configured.

        stored: dtype of what is not packed. upcast: compute in fp32 whatever it is stored in, as a
        packed base and an unquantised teacher do. attn_implementation: flex_attention, which
        compiles what it runs, is counted as sdpa. compute_dtype: of products of packed weights.
        """
        attention = "eager" if attn_implementation == "eager" else SDPA
        model = meta_base(config, quantization, stored, attention)
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
        """Return full rows, every token of which is predicted."""
        ids = torch.zeros(rows, length, dtype=torch.int64)
        # `to` adds what is computed on the host
        batch = batch_from_tensors(ids, torch.ones_like(ids)).to(torch.device("cpu"))
        faked = {
            name: self.tensor(*value.shape, dtype=value.dtype)
            for name, value in vars(batch).items()
            if isinstance(value, Tensor)
        }
        made = copy.copy(batch)
        vars(made).update(faked)
        return made

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        with self._mode:
            return torch.empty(shape, dtype=dtype, device=self.device)

    def peak_of(self, act: Callable[[], object]) -> int:
        """Return the bytes that `act` would add to what exists, at its highest moment."""
        with self._mode, few_blocks(), Ledger() as ledger:
            act()
        return ledger.highest

    def _fill(self, model: Any, quantization: str | None) -> None:
        """Replace every parameter on the meta device by one without storage on this device."""
        packed = {id(module.weight): module for _, module in quantized_linears(model)}
        made: dict[int, Any] = {}  # tied weights stay one
        for module in model.modules():
            for name, old in module._parameters.items():
                if old is not None and id(old) not in made:
                    if id(old) in packed:
                        made[id(old)] = self._packed(packed[id(old)], str(quantization))
                    else:
                        empty = self.tensor(*old.shape, dtype=old.dtype)
                        made[id(old)] = nn.Parameter(empty, requires_grad=old.requires_grad)
                if old is not None:
                    module._parameters[name] = made[id(old)]
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = self.tensor(*parameter.shape, dtype=parameter.dtype)

    def _packed(self, module: Any, quantization: str) -> Tensor:
        """Return a packed weight with its scales, as bitsandbytes keeps them."""
        shape = torch.Size((module.out_features, module.in_features))
        blocks = math.ceil(shape.numel() / BLOCK)
        nested = QuantState(
            absmax=self.tensor(math.ceil(blocks / NESTED_BLOCK)),
            code=self.tensor(256),
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        weight: Any = self.tensor((shape.numel() + 1) // 2, 1, dtype=torch.uint8)
        weight.quant_state = QuantState(
            absmax=self.tensor(blocks, dtype=torch.uint8),
            shape=shape,
            code=self.tensor(16),
            blocksize=BLOCK,
            quant_type=quantization,
            dtype=torch.float32,
            offset=self.tensor(),
            state2=nested,
        )
        return weight


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
            if isinstance(asked, FakeTensor) and not asked.fake_mode.in_kernel_invocation:
                return asked.fake_device
            return func(asked)
        for leaf in tree_leaves((args, kwargs)):  # one that is not known yet was there before
            self._note(leaf, made=False)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._note(leaf, made=True)
        inside = 0
        if func is _PACKED_PRODUCT:
            # The dense weight in the rows' dtype, and its scales in fp32. A GPU with a kernel for
            # so few rows makes neither; it is then counted too high, by one weight.
            rows, _, shape = args[:3]
            inside = math.prod(shape) * rows.element_size() + math.prod(shape) // BLOCK * 4
        elif func is _ATTENTION_BACKWARD:  # the gradient is multiplied with the output
            inside = args[0].numel() * args[0].element_size()
        self.highest = max(self.highest, self._live + inside)
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
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self._live -= self._sizes.pop(key)


def bytes_of(model: Any) -> int:
    """Return the bytes of a fake model's parameters, packed weights with their scales, and buffers;
    its gradients and adapters are left out.
    """
    own = adapter_parameters(model).values() if hasattr(model, "_npt_state") else ()
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                tensors[id(tensor)] = tensor
                state = getattr(tensor, "quant_state", None)
                while state is not None:
                    parts = (state.absmax, state.code, state.offset)
                    tensors |= {id(part): part for part in parts if isinstance(part, Tensor)}
                    state = state.state2
    for parameter in own:
        del tensors[id(parameter)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
