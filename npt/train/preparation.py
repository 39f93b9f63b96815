"""What is computed before the loop: the smoke test and the calibrated start."""

from __future__ import annotations

from dataclasses import replace

import torch

from npt.adapters.attach import adapter_parameters, adapter_shapes, attached_config, set_adapters
from npt.calibration.report import Calibration
from npt.config import TrainConfig
from npt.step.splitting import MicroBatchSplitter
from npt.train.calibrated_start import calibrated_start, where_training_begins
from npt.train.memory_fit import MemoryFit
from npt.train.run_data import RunData
from npt.train.run_setup import RunSetup
from npt.train.smoke import smoke_test


class Preparation:
    """Smoke test and calibrated start of a run, with as many samples at once as fit.

    Args:
        setup, data, memory: of the run.
    """

    def __init__(self, setup: RunSetup, data: RunData, memory: MemoryFit):
        self._setup, self._data, self._memory = setup, data, memory

    def smoke_test(self, config: TrainConfig) -> str:
        """Run the smoke test on as many samples of the first batch as are computed at once."""
        setup, batch = self._setup, self._data.first_batch()

        def test() -> str:
            part = setup.splitter.parts(batch)[0]
            return smoke_test(setup.model, part, setup.strategy, config)

        return self._memory.fitting(test, setup.splitter, batch, "the smoke test")

    def calibrate(self) -> Calibration | None:
        """Solve the adapters' start, and give every process the main one's; None if it was not
        solved.
        """
        setup, data = self._setup, self._data
        if setup.teacher is not None:
            setup.say(
                "the start is solved against the student's own base; training then goes on to the"
                " unquantised teacher"
            )
        # A splitter of its own: the graph goes through the whole teacher, and its lack of memory
        # says little of a micro-batch.
        splitter = MicroBatchSplitter(min(setup.config.batch_size, setup.splitter.samples))

        def solve() -> Calibration | None:
            return calibrated_start(
                setup.model,
                setup.tokenizer,
                data.solved_on,
                setup.config,
                batch_size=splitter.samples,
                console=setup.console,
            )

        found = self._memory.fitting(solve, splitter, data.first_batch(), "the calibration")
        if found is None:
            return None
        setup.say(where_training_begins(data.start, found))
        self._share_start()
        setup.adapter_config = attached_config(setup.model)
        return found

    def _share_start(self) -> None:
        """Give every process the start of the main one.

        Each has solved it while it waited, but rounding depends on its cores and kernels.
        """
        processes, model = self._setup.processes, self._setup.model
        if processes.size == 1:
            return
        own = attached_config(model)
        found = processes.gather_json(None if own.ranks is None else list(own.ranks))[0]
        config = replace(own, ranks=None if found is None else tuple(found))
        parameters, tensors = adapter_parameters(model), {}
        for name, shape in adapter_shapes(model, config).items():
            zeros = torch.zeros(shape, device=self._setup.device)
            tensor = parameters[name].detach().clone() if processes.main else zeros
            tensors[name] = processes.sum_(tensor)
        set_adapters(model, config, tensors)
