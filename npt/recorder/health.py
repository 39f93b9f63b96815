"""The health of one tensor, whatever it is: a line about its numbers, or an error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npt.errors import ConfigError, NumericalError, kind_of
from npt.guard.parallel import local
from npt.recorder.observations import Observations
from npt.recorder.record import Row
from npt.recorder.sites import Site
from npt.tracer.tensors import dtype_name, first_bad


def check(tensor: Tensor, name: str = "tensor") -> Row:
    """Return the health of a tensor; print it for a line of its shape, dtype and numbers.

    Takes any dtype, layout and device, and changes nothing. Of a sparse tensor the stored values
    count, of a sharded one this process's shard; a 4-bit weight of bitsandbytes is dequantised.
    Waits for the device.

        print(check(hidden, "hidden"))
        hidden: float32 [2, 16, 64], -3.1 to 4.7, mean 0.002, deviation 1.1, RMS 1.1

    Args:
        tensor: the tensor.
        name: how to call it.

    Raises:
        NumericalError: it holds NaN or Inf; -Inf counts too, even in a mask.
        ConfigError: it is not a tensor, or its numbers cannot be read.
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} is {kind_of(tensor)}, not a tensor: pass a torch.Tensor")
    numbers = _numbers(tensor, name).detach()
    observed = Observations(None)
    site = Site(name, None, element=False, grows=False, parameters=())
    try:
        observed.add(site, "", numbers, observed.reduce(numbers), source=None)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}; pass its parts or its dequantised values") from error
    (row,) = observed.rows()
    if row.finite:
        return row
    at = list(first_bad(numbers))
    first = f", the first at {at}" if at else ""
    raise NumericalError(
        f"{row}{first}; to find the operation that made it, call npt.trace(model, batch)"
    )


def _numbers(tensor: Tensor, name: str) -> Tensor:
    """Return the numbers of a tensor as a dense tensor with real memory."""
    packing: Any = getattr(tensor, "quant_state", None)
    if packing is not None:
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(tensor.data, packing)
    tensor = local(tensor)
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout != torch.strided:
        tensor = tensor.values()
    if tensor.is_meta:
        raise ConfigError(
            f"{name} is {dtype_name(tensor.dtype)} {list(tensor.shape)} on the meta device, which"
            " has no numbers: check it after its weights are loaded"
        )
    return tensor
