"""CUDA devices on a machine without one: tensors there hold numbers that the CPU computes.

Within `simulated_cuda()` the devices `cuda:0`, `cuda:1`, ... exist. Mixing tensors of two devices
fails as it does on cards. What would make the host wait for a device (reading a value, a copy that
is not from or to pinned memory or not asked for as non-blocking, an operation whose result's shape
depends on values) is counted, and raises within `no_waits()`. A non-blocking copy to the host holds
NaN until an event recorded after it has been waited for, so that whoever reads too early sees NaN.

An assertion that fails in a kernel (`torch._assert_async`, an index out of range) leaves the card
with a sticky error, as does `state.lose_card()`: whatever asks it for anything raises from then on,
and a call of bitsandbytes ends the process (`state.exit`), as its C code does.

Underneath, the tensors are on torch's `meta` device, for which autograd needs no driver. Kernels
are the CPU's: nothing is said about CUDA's rounding, speed or memory.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stub_bitsandbytes
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import npt.base.attention

aten = torch.ops.aten

ACROSS_DEVICES = {"aten::_to_copy", "aten::copy_", "aten::_foreach_norm", "aten::set_"}
"""Operations that take tensors of several devices."""

SHAPED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::bincount"}
SHAPED_BY_VALUES |= {"aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"}
SHAPED_BY_VALUES |= {"aten::repeat_interleave"}
"""Operations that wait on CUDA: the shape of what they return depends on values."""

READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::allclose"}
READS |= {"aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_svd"}
READS |= {"aten::linalg_lstsq"}


WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"
"""What torch's default wheels of 2.11 are compiled for (its RELEASE.md)."""


FREE = {"aten::detach", "aten::alias", "aten::view", "aten::_unsafe_view", "aten::t"}
FREE |= {"aten::slice", "aten::select", "aten::expand", "aten::unsqueeze", "aten::squeeze"}
FREE |= {"aten::transpose", "aten::permute", "aten::as_strided", "aten::split", "aten::unbind"}
"""Operations that ask the card for nothing."""


PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Products that TF32 may be taken for, with the place of their first operand."""

INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
HALVES = {torch.float16, torch.bfloat16}

UNSUPPORTED: dict[str, set[torch.dtype]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"), INTEGERS),
    **dict.fromkeys(("vdot", "max_pool2d", "max_pool3d"), INTEGERS),
    **dict.fromkeys(("histc", "igamma", "igammac", "angle"), HALVES),
    "scatter_reduce": {torch.bool},
}
"""Dtypes of the CPU's operators that CUDA's have not, by `OpInfo.dtypes` and `dtypesIfCUDA`."""


class HostWaitError(AssertionError):
    """The host would wait for the device where it must not."""


@dataclass
class _State:
    """The simulation that is running.

    Attributes:
        waits: operations that made the host wait, in order.
        error: that the card is left with; None for a card that works.
        exit: ends the process, from bitsandbytes' code.
        allocations: so far, of an operation that returns new tensors and of pinned memory one each.
        full_at: the allocation for which there is no memory, by its number from 1.
    """

    devices: int
    capability: tuple[int, int]
    waits: list[str] = field(default_factory=list)
    forbidden: bool = False
    in_flight: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    kernels: list[str] = field(default_factory=list)
    error: str | None = None
    told: bool = False
    autocast: torch.dtype | None = None
    allocations: int = 0
    full_at: int | None = None
    exit: Callable[[], Any] = lambda: _exit()

    def lose_card(self, why: str = "device-side assert triggered", *, told: bool = True) -> None:
        """Leave a sticky error, which a wait tells of first if it is not `told` by every launch."""
        self.error = f"CUDA error: {why}\nCUDA kernel errors might be asynchronously reported"
        self.told = told

    def allocate(self, pinned: bool = False) -> None:
        self.allocations += 1
        if self.allocations == self.full_at:
            if pinned:
                raise torch.AcceleratorError("CUDA error: out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0")

    def ask(self, wait: bool = False) -> None:
        """Ask the card for anything."""
        self.told = self.told or wait
        if self.error is not None and self.told:
            raise torch.AcceleratorError(self.error)

    def wait(self, why: str) -> None:
        self.ask(wait=True)
        self.waits.append(why)
        if self.forbidden:
            raise HostWaitError(f"the host would wait for the device: {why}")

    def arrive(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Let copies to the host land."""
        for target, source in copies:
            target.data.copy_(source)
        self.in_flight = [c for c in self.in_flight if all(c is not done for done in copies)]


_state: _State | None = None


def _exit() -> None:
    raise ExitedError


class ExitedError(BaseException):
    """The process would have ended in C, without a chance for anybody to do anything."""


class Simulated(Tensor):
    """A tensor on a simulated device; `held` has its numbers on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, index: int) -> "Simulated":
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta", index),
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _device_of(super().device)

    is_cuda, is_meta, is_cpu = True, False, False  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Simulated({self.held}, device='{self.device}')"

    def tolist(self) -> Any:
        _running().wait("tolist")
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a cuda tensor to numpy; use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def get_device(self) -> int:
        return self.device.index

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _running() -> _State:
    assert _state is not None, "a simulated tensor outside simulated_cuda()"
    return _state


def _device_of(device: Any) -> torch.device:
    """The device as it was asked for; torch's C++ sees simulated ones as meta."""
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if _is_simulated(device) else device


def _is_simulated(device: Any) -> bool:
    """Return whether this is a simulated device; the true meta device has no index."""
    device = torch.device(device)
    return device.type == "cuda" or (device.type == "meta" and device.index is not None)


class _Operations(TorchDispatchMode):
    """Computes on the CPU what is asked of a simulated device."""

    def __init__(self) -> None:
        super().__init__()
        # What torch asks before it would initialise CUDA for a factory function.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    state, name = _running(), func._schema.name
    tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [t for t in tensors if isinstance(t, Simulated)]
    asked = kwargs.get("device")
    if not here and (asked is None or not _is_simulated(asked)):
        pinned = bool(kwargs.pop("pin_memory", False))
        result = func(*args, **kwargs)
        if pinned:
            _pin(result)
        return result
    kwargs.pop("pin_memory", None)
    if name.startswith("bitsandbytes::") and name in KERNELS:
        return _of_bitsandbytes(state, KERNELS[name], args, kwargs)
    if name not in FREE:
        state.ask()
    device = next(iter(here)).device if asked is None else _device_of(asked)
    if device.type == "cuda" and not (func.is_view or func._schema.is_mutable):
        state.allocate()
    if name not in ACROSS_DEVICES:
        # A scalar of the host may take part in an operation on a device.
        devices = {t.device for t in tensors if isinstance(t, Simulated) or t.dim() > 0}
        if len(devices) > 1:
            raise RuntimeError(f"{name}: tensors on two devices, {sorted(map(str, devices))}")
    _notice_wait(state, name, args, kwargs)
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if name == "aten::copy_" and not isinstance(args[0], Simulated):
        target, source = args[0], args[1].held
        if _non_blocking(args, kwargs):
            return _fly(state, target, source.clone())
        return target.copy_(source)
    held_args, held_kwargs = _mapped(_held, (args, kwargs))
    _refuse_dtype(name, held_args)
    held_args = _rounded(name, held_args)
    if name == "aten::_assert_async" and not held_args[0]:
        return state.lose_card()
    try:
        result = func(*held_args, **held_kwargs)
    except IndexError:
        state.lose_card()
        state.ask()
    if func._schema.is_mutable:  # what was changed is the caller's own tensor
        return _changed(func, args, kwargs)
    if device.type == "meta":
        return _mapped(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, result)
    if device.type == "cpu":
        in_flight = _non_blocking((), kwargs)
        return _fly(state, torch.empty_like(result), result) if in_flight else result
    return _mapped(
        lambda leaf: Simulated(leaf, device.index) if type(leaf) is Tensor else leaf, result
    )


LIBRARY, KERNELS = stub_bitsandbytes.load()


def _of_bitsandbytes(state: _State, kernel: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run bitsandbytes' Python for CUDA; its C code ends the process at a pending error."""

    def before() -> None:
        if state.error is not None:
            state.exit()

    with mock.patch.object(LIBRARY, "before", before), _Operations(), _Functions():
        return kernel(*args, **kwargs)


def _rounded(name: str, args: Any) -> Any:
    """Return operands as TF32 has them, 10 bits of mantissa, where products are computed so."""
    first = PRODUCTS.get(name)
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee")  # since torch 2.9
    if first is None or precision != "tf32":
        return args
    if _running().capability < (8, 0) or args[first].dtype != torch.float32:
        return args
    return (*args[:first], *map(round_to_tf32, args[first : first + 2]), *args[first + 2 :])


def round_to_tf32(x: Tensor) -> Tensor:
    """Round fp32 numbers to the nearest of TF32, ties to even."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """`tree_map`, which takes longer over the arguments of a small operation than the operation
    takes.
    """
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_mapped(change, part) for part in tree])
    if kind is dict:
        return {name: _mapped(change, part) for name, part in tree.items()}
    return tree_map(change, tree) if isinstance(tree, (tuple, list, dict)) else change(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(found.append, tree)
    return found


def _changed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operation that writes to its arguments returns: these."""
    if not func._schema.returns:
        return None
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    aliases = {a.name: a.alias_info for a in func._schema.arguments}
    written = [given[name] for name, alias in aliases.items() if alias and alias.is_write]
    return written[0] if len(func._schema.returns) == 1 else tuple(written)


def _held(leaf: Any) -> Any:
    if isinstance(leaf, Simulated):
        return leaf.held
    if isinstance(leaf, Tensor) and leaf.device.type == "meta" and leaf.device.index is not None:
        assert leaf.numel() == 0, "a tensor without numbers"  # of torch.tensor([], device=...)
        return leaf.new_empty(leaf.shape, device="cpu")
    return leaf


def _notice_wait(state: _State, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Count what makes the host wait on CUDA. A copy between host and card waits as well, unless it
    is non-blocking and the host's memory is pinned or its target is new.
    """
    if name in READS or (name in SHAPED_BY_VALUES and kwargs.get("output_size") is None):
        state.wait(name)
    elif name in ("aten::index", "aten::index_put_", "aten::index_put"):
        if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            state.wait(f"{name} with a mask")
    elif name in ("aten::_to_copy", "aten::copy_"):
        source, there = args[0], kwargs.get("device")
        pageable = [source]
        if name == "aten::copy_":
            source, there, pageable = args[1], args[0].device, list(args[:2])
        there = source.device if there is None else _device_of(there)
        pageable = [t for t in pageable if t.device.type == "cpu" and not _is_pinned(t)]
        crosses = "cpu" in (source.device.type, there.type) and source.device != there
        if crosses and (pageable or not _non_blocking(args, kwargs)):
            state.wait(f"copy of {tuple(source.shape)} from {source.device} to {there}")


def _non_blocking(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _fly(state: _State, target: Tensor, source: Tensor) -> Tensor:
    """Begin a copy to the host: until it arrives, what is read there is wrong."""
    with torch.no_grad():
        if target.is_floating_point():
            target.fill_(float("nan"))
        else:
            target.zero_()
    state.in_flight.append((target, source))
    return target


def _is_pinned(tensor: Tensor) -> bool:
    return (
        not isinstance(tensor, Simulated)
        and tensor.untyped_storage().data_ptr() in _running().pinned
    )


def _pin(tensor: Tensor) -> Tensor:
    assert not isinstance(tensor, Simulated), "only tensors of the host can be pinned"
    _running().allocate(pinned=True)
    # Kept for the simulation's length: an address that is freed could be given to pageable memory.
    _kept.append(tensor)
    _running().pinned.add(tensor.untyped_storage().data_ptr())
    return tensor


_kept: list[Tensor] = []


class _Functions(TorchFunctionMode):
    """The choices that torch makes in C++ before any operation is dispatched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if name == "cuda" and args:
            return args[0].to(torch.device("cuda", 0), *args[2:], **kwargs)
        if name in ("untyped_storage", "storage") and args and isinstance(args[0], Simulated):
            return args[0].held.untyped_storage()
        pinned = kwargs.get("pin_memory") and not _on_cuda(kwargs.get("device"))
        if pinned:
            kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
        args, kwargs = _mapped(_with_index, (tuple(args), kwargs))
        if name == "tensor" and _on_cuda(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if _running().autocast is not None and name in LOWER | FULL:
            args, kwargs = _mapped(partial(_cast, name), (args, kwargs))
        if name == "to" and isinstance(args[0], Simulated) and _is_there(args, kwargs):
            return args[0]
        result = func(*args, **kwargs)
        return _pin(result) if pinned else result


def _refuse_dtype(name: str, args: Any) -> None:
    """Refuse what the CPU computes and CUDA does not."""
    for dtype in UNSUPPORTED.get(name.removeprefix("aten::"), ()):
        if any(isinstance(x, Tensor) and x.dtype == dtype for x in args):
            raise NotImplementedError(f'"{name}" not implemented for {dtype} on CUDA')


def _is_there(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether `Tensor.to` has nothing to do; torch's C++ takes cuda and meta for two."""
    tensor, asked = args[0], [*args[1:], *(kwargs.get(name) for name in ("device", "dtype"))]
    wanted = [torch.device(each) if isinstance(each, str) else each for each in asked]
    kinds = (torch.device, torch.dtype, bool, type(None))
    return (
        all(isinstance(each, kinds) and each in (tensor.device, tensor.dtype, None, False)
            for each in wanted)
        and not kwargs.get("copy") and kwargs.get("memory_format") is None
    )  # fmt: skip


def _on_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _with_index(leaf: Any) -> Any:
    """`cuda` means the current device; without an index torch would ask the driver which
    that is.
    """
    if isinstance(leaf, torch.device):
        return torch.device("cuda", 0) if leaf.type == "cuda" and leaf.index is None else leaf
    return "cuda:0" if isinstance(leaf, str) and leaf == "cuda" else leaf


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Attention by the CPU's fused kernel, with a record of the kernel that CUDA would take.

    As of torch's `sdp_utils.cpp`: the flash kernel takes neither fp32 nor a mask, the
    memory-efficient one no `enable_gqa`.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    if not isinstance(query, Simulated):
        return _true_attention(*args, **kwargs)
    mask, grouped = given.get("attn_mask"), given.get("enable_gqa", False)
    half = query.dtype in (torch.float16, torch.bfloat16)
    kernel = "flash" if half and mask is None else "math" if grouped else "efficient"
    _running().kernels.append(kernel)
    if mask is not None and mask.dtype == torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = zeros.masked_fill(~mask, -torch.inf)
    settings = {"attn_mask": mask, "scale": given.get("scale")}
    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    causal = given.get("is_causal", False)
    return fused(query, key, value, given.get("dropout_p", 0.0), causal, **settings)[0]


_true_attention = functional.scaled_dot_product_attention


_true_autocast, _true_enabled = torch.autocast, torch.is_autocast_enabled
_true_dtype = torch.get_autocast_dtype

LOWER = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__", "__rmatmul__", "mv"}
LOWER |= {"einsum", "conv1d", "conv2d", "scaled_dot_product_attention"}
FULL = {"softmax", "log_softmax", "cross_entropy", "nll_loss", "kl_div", "mse_loss", "exp", "log"}
FULL |= {"pow", "__pow__", "rsqrt", "sum", "prod", "norm", "cumsum", "softplus", "layer_norm"}
"""What autocast for CUDA casts to its dtype, and what to fp32 (torch/amp's documentation)."""


class _Autocast(contextlib.ContextDecorator):
    """`torch.autocast("cuda")`: casts what is called from Python, by name."""

    def __init__(self, dtype: torch.dtype | None = None, enabled: bool = True, **_: Any):
        self._next = (dtype or torch.float16) if enabled else None

    def __enter__(self) -> "_Autocast":
        self._before, _running().autocast = _running().autocast, self._next
        return self

    def __exit__(self, *_: Any) -> None:
        _running().autocast = self._before


def _autocast(device_type: str, *arguments: Any, **settings: Any) -> Any:
    kind = _Autocast if device_type == "cuda" else partial(_true_autocast, device_type)
    return kind(*arguments, **settings)


def _is_autocast_enabled(kind: str = "cuda") -> bool:
    return _running().autocast is not None if kind == "cuda" else _true_enabled(kind)


def _autocast_dtype(kind: str) -> torch.dtype:
    return (_running().autocast or torch.float16) if kind == "cuda" else _true_dtype(kind)


def _cast(name: str, leaf: Any) -> Any:
    """Cast an argument of a function as autocast does."""
    dtype = _running().autocast if name in LOWER else torch.float32
    cast = isinstance(leaf, Simulated) and leaf.dtype in (torch.float32, *HALVES)
    return leaf.to(dtype) if cast else leaf


class _Generator(torch.Generator):
    """Draws as the CPU's does, and takes a card's state of 16 bytes."""

    def set_state(self, state: Tensor) -> torch.Generator:  # type: ignore[override]
        if len(state) != 16:
            raise RuntimeError(f"RNG state is wrong size: {len(state)} bytes, not 16")
        return self


def _make_generator(device: Any = "cpu") -> torch.Generator:
    return _Generator() if torch.device(device).type == "cuda" else _true_generator(device)


_true_generator = torch.Generator


class _Event:
    """Has arrived once it was asked for twice, or was waited for."""

    def __init__(self, *_: Any, **__: Any):
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._asked = 0

    def record(self, stream: Any = None) -> None:
        _running().ask()
        self._copies = list(_running().in_flight)

    def query(self) -> bool:
        _running().ask()
        self._asked += 1
        if self._asked < 2:
            return False
        _running().arrive(self._copies)
        return True

    def synchronize(self) -> None:
        _running().ask()
        _running().arrive(self._copies)

    def elapsed_time(self, other: "_Event") -> float:
        return 0.0

    def wait(self, stream: Any = None) -> None: ...


class _Stream:
    def __init__(self, device: Any = None, **_: Any):
        self.device = torch.device("cuda", 0) if device is None else torch.device(device)

    def synchronize(self) -> None:
        _synchronize()

    def is_capturing(self) -> bool:
        return False

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event


def _synchronize(device: Any = None) -> None:
    _running().wait("torch.cuda.synchronize")
    _running().arrive(list(_running().in_flight))


def _asking(result: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """Ask the card, then return the result."""

    def ask(*arguments: Any, **_: Any) -> Any:
        _running().ask()
        return result(*arguments)

    return ask


_CUDA: dict[str, Callable[..., Any] | type] = {
    "is_available": lambda: True,
    "device_count": lambda: _running().devices,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "Event": _Event,
    "Stream": _Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "synchronize": _synchronize,
    "is_bf16_supported": lambda including_emulation=True: (
        including_emulation or _running().capability >= (8, 0)
    ),
    "is_initialized": lambda: True,
    "is_current_stream_capturing": lambda: False,  # a build for CUDA asks the driver
    "empty_cache": _asking(),
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "mem_get_info": _asking(lambda *_: (60 * 2**30, 80 * 2**30)),
    "get_device_name": lambda device=None: "simulated",
    "get_device_capability": lambda device=None: _running().capability,
    "get_arch_list": lambda: WHEEL.split(),
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="simulated",
        total_memory=80 * 2**30,
        multi_processor_count=1,
        major=_running().capability[0],
        minor=_running().capability[1],
    ),
    "get_rng_state": _asking(lambda *_: torch.zeros(16, dtype=torch.uint8)),
    "set_rng_state": _asking(),
    "get_rng_state_all": _asking(
        lambda: [torch.zeros(16, dtype=torch.uint8) for _ in range(_running().devices)]
    ),
    "set_rng_state_all": _asking(),
    "manual_seed": _asking(),
    "manual_seed_all": _asking(),
}


@contextmanager
def simulated_cuda(devices: int = 1, capability: tuple[int, int] = (9, 0)) -> Iterator[_State]:
    """Within the context CUDA is available, with this many devices of a compute capability.

    Yields:
        The simulation: `waits` lists what made the host wait, `kernels` which kernels attention
        would have taken.
    """
    global _state
    assert _state is None, "one simulation at a time"
    # attention by name and not by a function mode, which is off in what backward recomputes
    fakes = [(torch.cuda, name, fake) for name, fake in _CUDA.items()]
    fakes += [
        (torch.accelerator, "current_stream", _Stream),
        (functional, "scaled_dot_product_attention", _attention),
        (npt.base.attention, "scaled_dot_product_attention", _attention),
        (torch, "Generator", _make_generator),
        # in every thread: a batch is pinned by the one that made it
        (Tensor, "pin_memory", lambda tensor, device=None: _pin(tensor.clone())),
        (Tensor, "is_pinned", lambda tensor, device=None: _is_pinned(tensor)),
        (torch, "autocast", _autocast),
        (torch.amp, "autocast", _autocast),
        (torch, "is_autocast_enabled", _is_autocast_enabled),
        (torch, "get_autocast_dtype", _autocast_dtype),
    ]
    count = mock.patch.object(torch._C, "_cuda_getDeviceCount", lambda: devices, create=True)
    _state = _State(devices, capability)
    with ExitStack() as stack:
        for patch in (count, *(mock.patch.object(*fake) for fake in fakes)):
            stack.enter_context(patch)
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        try:
            yield _state
        finally:
            _state = None
            _kept.clear()


@contextmanager
def no_waits() -> Iterator[None]:
    """Within the context an operation that makes the host wait raises `HostWaitError`."""
    state = _running()
    before, state.forbidden = state.forbidden, True
    try:
        yield
    finally:
        state.forbidden = before


def to_cuda(model: Any) -> Any:
    """Move a model's parameters, quantisation statistics and buffers to a simulated device, in
    place.
    """
    moved: dict[int, nn.Parameter] = {}
    device = torch.device("cuda", 0)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, Simulated):
                continue
            if id(parameter) not in moved:  # tied weights stay one
                moved[id(parameter)] = _moved(parameter, device)
            module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def _moved(parameter: nn.Parameter, device: torch.device) -> Any:
    held = parameter.detach().as_subclass(Tensor)
    moved: Any = nn.Parameter(held.to(device), requires_grad=parameter.requires_grad)
    if hasattr(parameter, "quant_state"):
        moved.quant_state, moved.quant_type = parameter.quant_state, parameter.quant_type
        moved.blocksize, moved.bnb_quantized = parameter.blocksize, True
        moved.quant_state.to(device)
    return moved
