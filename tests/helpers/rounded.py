"""A 4-bit base as another kind of device would have packed it: the same codes, statistics that are
rounded otherwise.
"""

from typing import Any

import torch

from npt.packed import quantized_linears


def flip_last_bit(tensor: torch.Tensor) -> None:
    """Change the last bit of a tensor's first number, in place (little-endian)."""
    tensor.view(-1).view(torch.uint8)[:1].bitwise_xor_(1)


def round_otherwise(model: Any) -> Any:
    """Change the last bit of a number in every statistic that another device may round otherwise,
    in place.
    """
    for _, module in quantized_linears(model):
        state = module.weight.quant_state
        for tensor in (state.absmax, state.offset, state.state2.absmax):
            flip_last_bit(tensor)
    return model
