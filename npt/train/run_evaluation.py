"""The evaluations of a run: its student against its teacher, on the run's own held-out samples."""

from __future__ import annotations

from npt.data.batch import batches
from npt.errors import DataError
from npt.evaluation.attribution import Reference, reference_outputs
from npt.evaluation.evaluate import Fidelity, evaluate
from npt.train.memory_fit import MemoryFit
from npt.train.run_data import RunData
from npt.train.run_setup import RunSetup


class RunEvaluator:
    """Measures the student as it is."""

    def __init__(self, setup: RunSetup, data: RunData, memory: MemoryFit):
        self._setup, self._data, self._memory = setup, data, memory
        self._reference: Reference | None = None  # a separate teacher's outputs

    def __call__(self) -> Fidelity:
        """Measure the student as it is, with no more samples at once than in training.

        Raises:
            DataError: there is no sample to evaluate on.
        """
        setup, splitter = self._setup, self._memory.evaluation
        splitter.samples = min(splitter.samples, setup.splitter.samples)
        samples = self._data.eval_samples
        if not samples:  # training has some, so all of them were left out for their ids
            raise DataError(
                "no sample to evaluate on: every one has ids outside the vocabulary"
                f" [0, {setup.model.config.vocab_size}); is this the tokenizer of the model?"
            )
        largest = next(batches(samples, splitter.samples))

        def measure() -> Fidelity:
            at_once = splitter.samples
            if setup.teacher is not None and self._reference is None:
                self._reference = reference_outputs(setup.teacher, samples, batch_size=at_once)
            return evaluate(
                setup.model,
                setup.tokenizer,
                samples,
                batch_size=at_once,
                unquantized=self._reference,
                between=setup.stop.check,
                sources=self._data.eval_labels,
            )

        return self._memory.fitting(measure, splitter, largest, "an evaluation")
