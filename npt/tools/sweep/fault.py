"""A planted fault: for one batch, activations of another size, as a token that nobody has seen
before or a broken kernel would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel

from npt.adapters.attach import npt_layers
from npt.tools.sweep.settings import ProbeConfig


@contextmanager
def enlarged(model: PreTrainedModel, probe: ProbeConfig, armed: bool = True) -> Iterator[None]:
    """Make the base's activations `fault_scale` times as large within the context, for teacher and
    student alike.

    Args:
        model: with adapters attached.
        probe: `fault_scale`, and `fault_place`: the output of every converted layer's attention,
            which modulates the student and is part of the teacher's stream, or the embedding.
        armed: False does nothing.
    """

    def enlarge(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # of attention
            return (output[0] * probe.fault_scale, *output[1:])
        return output * probe.fault_scale

    hit = [layer.self_attn for _, layer in npt_layers(model)]
    if probe.fault_place == "embedding":
        hit = [model.get_input_embeddings()]
    with ExitStack() as stack:
        for module in hit if armed else ():
            stack.callback(module.register_forward_hook(enlarge).remove)
        yield
