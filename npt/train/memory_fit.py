"""How many samples are computed at once, before and within a run, as memory allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from npt.adapters.converted import is_sharded
from npt.base.attention import attention_name
from npt.base.precision import quantization_of
from npt.data.batch import Batch
from npt.errors import ConfigError
from npt.planning.memory import MemoryPlan, Workload, shown
from npt.runs.checkpoint import Checkpoint
from npt.runs.run_folder import RunFolder
from npt.step.splitting import MicroBatchSplitter, free_memory, oom_message
from npt.train.run_setup import RunSetup

T = TypeVar("T")


class MemoryFit:
    """Plans for `--max_memory`, and repeats with fewer samples whatever did not fit."""

    def __init__(self, setup: RunSetup):
        self._setup = setup
        self.splitter = setup.splitter
        self.evaluation = MicroBatchSplitter(setup.config.batch_size)
        self.folder: RunFolder | None = None
        self._unreported: list[dict[str, Any]] = []
        self.plan = self._make_plan()

    def note(self) -> str | None:
        """Return a line about the plan, if there is one."""
        if self.plan is None:
            return None
        config = self._setup.config
        at_once = f"{self.plan.samples_at_once} of {config.batch_size} samples at once"
        peak = f"predicted peak {shown(self.plan.peak)} in the {self.plan.phase}"
        return f"--max_memory {config.max_memory}: {at_once}, {peak}"

    def recall(self, checkpoint: Checkpoint) -> None:
        """Begin with the samples that fitted in the resumed run, under the same limit."""
        process, setup = self._setup.processes.index, self._setup
        shrunk_to = dict(enumerate(checkpoint.record.get("samples_at_once", []))).get(process)
        if shrunk_to is not None and "max_memory" not in setup.changed:
            samples = min(self.splitter.samples, shrunk_to)
            self.splitter.samples = self.splitter.shrunk_to = samples

    def fitting(
        self, act: Callable[[], T], splitter: MicroBatchSplitter, batch: Batch, name: str
    ) -> T:
        """Return the result of `act`, with fewer samples at once until it fits.

        Args:
            act: computes in parts of `splitter`, which is shrunk.
            splitter: of the act.
            batch: the largest that is computed.
            name: of the act.

        Raises:
            NoMemoryError: one sample at once is too much.
        """
        while True:
            try:
                return act()
            except (RuntimeError, MemoryError) as error:
                message = oom_message(error)
                # Processes that share a base stay in step: one that stopped inside a layer would
                # not.
                if message is None or is_sharded(self._setup.model):
                    raise
            free_memory()
            before = splitter.shrink(batch, message)
            now = splitter.samples
            said = f"{name}: out of memory with {before} samples at once ({message})"
            self._setup.say(f"{said}; it is begun again with {now}")
            lack = {"during": name, "samples": before, "samples_at_once": now, "message": message}
            self._unreported.append(lack)
            self.report()

    def report(self) -> None:
        """Write events for lacks of memory, once there is a folder."""
        while self.folder is not None and self._unreported:
            self.folder.event("out_of_memory", **self._unreported.pop(0))

    def _make_plan(self) -> MemoryPlan | None:
        """Plan how much is computed at once under `--max_memory`, if it is given.

        Raises:
            ConfigError: one sample at a time is too much, or the base is not all on one device.
        """
        setup, model, teacher = self._setup, self._setup.model, self._setup.teacher
        limit = setup.config.max_memory_bytes
        if limit is None:
            return None
        devices = {parameter.device for parameter in model.parameters()}
        if is_sharded(model) or len(devices) > 1:
            raise ConfigError(
                f"--max_memory is {setup.config.max_memory}, but the base is spread over several"
                " devices; lower --batch_size"
            )
        workload = Workload(
            model.config,
            setup.adapter_config,
            setup.config,
            setup.data_config.max_length,
            quantization_of(model),
            model.model.embed_tokens.weight.dtype,
            None if teacher is None else teacher.model.embed_tokens.weight.dtype,
            setup.device,
            setup.processes.size,
            attention_name(model) == "eager",
        )
        plan = workload.fitting(limit)
        self.splitter.samples = plan.samples_at_once
        self.evaluation.samples = plan.evaluated_at_once
        return plan
