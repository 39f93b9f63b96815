"""transformers' Trainer under FSDP2 on CPUs, where accelerate has FSDP for accelerators alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
"""Arguments of TrainingArguments."""


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Let accelerate take the plugin of FSDP on CPUs as it does on GPUs; all else is its own."""
    made = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        made(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            # from which each later AcceleratorState takes its own
            PartialState._shared_state["distributed_type"] = self.distributed_type

    with mock.patch.object(AcceleratorState, "__init__", init), mock.patch.dict(os.environ):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)  # the next may train otherwise
