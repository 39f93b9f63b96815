"""A planted fault: for one batch, activations of another size, as a token that nobody has seen
before or a broken kernel would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import npt_layers
from npt.tools.sweep.settings import ProbeConfig


@contextmanager
def enlarged(model: PreTrainedModel, probe: ProbeConfig, armed: bool = True) -> Iterator[None]:
    """Within the context the base's activations are `fault_scale` times as large, for teacher and
    student alike.

    Args:
        model: with adapters attached.
        probe: `fault_scale`, and `fault_place`: `attention` is the output of every converted
            layer's attention, which the student's modulation is made of and the teacher's stream
            has added; `embedding` is the stream's beginning.
        armed: False does nothing.
    """

    def attention(_module: Any, _inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (output[0] * probe.fault_scale, *output[1:])

    def embedding(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output * probe.fault_scale

    with ExitStack() as stack:
        if armed and probe.fault_place == "attention":
            for _, layer in npt_layers(model):
                stack.callback(layer.self_attn.register_forward_hook(attention).remove)
        elif armed:
            stack.callback(model.get_input_embeddings().register_forward_hook(embedding).remove)
        yield
