"""The steps before the loop: smoke test, calibrated start, and the content of `run.json`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from npt.adapters.attach import adapter_shapes, set_adapters
from npt.adapters.converted import adapter_parameters, attached_config, is_sharded, npt_layers
from npt.base.gguf.configuration import ORIGIN_ENTRY, origin_of
from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.base.quantization_error import product_errors
from npt.calibration.calibrate import calibrate
from npt.calibration.report import Calibration, print_calibration
from npt.config import TrainConfig
from npt.distill.splitting import MicroBatchSplitter
from npt.train.memory_fit import MemoryFit
from npt.train.run_data import RunData, makes_start
from npt.train.run_setup import RunSetup
from npt.train.smoke import smoke_test
from npt.versions import versions


class Preparation:
    """Smoke test and calibrated start of a run, with as many samples at once as fit."""

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
        """Solve the adapters' start, and give every process the main one's.

        None if the adapters were loaded or calibrated before; they are left as they are.
        """
        setup, config = self._setup, self._setup.config
        if setup.teacher is not None:
            setup.say(
                "the start is fitted to the student's own base; training then takes the"
                " unquantised teacher"
            )
        # A splitter of its own: the graph goes through the whole teacher, and its lack of memory
        # says little of a micro-batch.
        splitter = MicroBatchSplitter(min(config.batch_size, setup.splitter.samples))

        def solve() -> Calibration | None:
            if not makes_start(setup.model):
                return None
            calibration = calibrate(
                setup.model,
                setup.tokenizer,
                self._data.start_samples,
                config.calibration_tokens,
                batch_size=splitter.samples,
                seed=config.seed,
                console=setup.console,
            )
            print_calibration(calibration, setup.console)
            return calibration

        found = self._memory.fitting(solve, splitter, self._data.first_batch(), "the calibration")
        if found is None:
            return None
        setup.say(self._begin_of_training())
        self._share_start()
        setup.adapter_config = attached_config(setup.model)
        return found

    def _begin_of_training(self) -> str:
        begun = self._data.start.begun
        if begun:
            return f"training begins after the {begun} samples that the start was fitted to"
        return (
            "there are too few samples to leave out those that the start was fitted to, so the"
            " first losses are of tokens that it has seen"
        )

    def _share_start(self) -> None:
        """Give every process the start of the main one.

        Each has made it while it waited, but rounding depends on its cores and kernels.
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


def run_record(setup: RunSetup, data: RunData, base: BaseIdentity) -> dict[str, Any]:
    """Return settings, model, precision, device and data of a run, for `run.json`."""
    model = setup.model
    return {
        "settings": setup.all_settings(),
        "layers": [index for index, _ in npt_layers(model)],
        "trainable_parameters": sum(p.numel() for p in adapter_parameters(model).values()),
        "seed": setup.config.seed,
        "date": setup.date,
        **base.as_record(),
        "other_base": None,
        ORIGIN_ENTRY: origin_of(model.config),
        "precision": audit_precision(model, policy_dtype(model)).as_dict(),
        "product_errors": None if is_sharded(model) else product_errors(model),
        "device": str(setup.device),
        "deterministic": setup.deterministic,
        "processes": setup.processes.size,
        "versions": versions(),
        "heldout": data.heldout,
        "sources": [{"name": source.label, "share": source.share} for source in data.sources],
    }
