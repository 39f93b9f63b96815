"""Guards in trainers, which have a loop of their own."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from conformance_guards.run import Batch, Run, Window

ONE_LENGTH = "its windows have one length, so that the run without a micro-batch cannot be made"
LEFT_OUT = {
    "accumulation": ONE_LENGTH,
    "scaler": ONE_LENGTH,
    "two-processes": "it starts processes of its own",
}


def batches(windows: Sequence[Window]) -> list[Batch]:
    """Return the batches of windows of one micro-batch."""
    return [batch for window in windows for batch in window]


class Lightning:
    """A LightningModule whose training_step returns None for a NaN loss, under a Trainer."""

    left_out = LEFT_OUT
    callbacks: Sequence[Any] = ()

    def __init__(self, run: Run):
        import lightning  # noqa: F401

        self.run = run

    def loss(self, batch: Batch) -> Tensor | None:
        loss = self.run.net(**batch)
        return loss if torch.isfinite(loss) else None

    def train(self, windows: Sequence[Window]) -> None:
        from lightning import LightningModule
        from lightning import Trainer as LightningTrainer

        adapter = self
        run = self.run

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = run.net
                self.averaged = 0

            def training_step(self, batch: Batch, _: int) -> Tensor | None:
                return adapter.loss(batch)

            def configure_optimizers(self) -> Any:
                if run.scheduler is None:
                    return run.optimizer
                schedule = {"scheduler": run.scheduler, "interval": "step"}
                return {"optimizer": run.optimizer, "lr_scheduler": schedule}

            def on_train_batch_end(self, *_: Any) -> None:
                # as Lightning's WeightAveraging: once for each step that it counts
                if run.ema is not None and self.trainer.global_step > self.averaged:
                    self.averaged = self.trainer.global_step
                    run.ema.update_parameters(run.net)

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = LightningTrainer(
            accelerator="cpu",
            devices=1,
            callbacks=[*self.callbacks],
            max_epochs=1,
            gradient_clip_val=run.max_norm,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data: Any = batches(windows)
        loader = torch.utils.data.DataLoader(data, batch_size=None)
        trainer.fit(Module(), loader)


class GuardedLightning(Lightning):
    """npt.guard.LightningGuard in a Trainer of Lightning."""

    handles_spikes = True

    def __init__(self, run: Run):
        from npt.guard import LightningGuard

        super().__init__(run)
        self.callbacks = [LightningGuard(trace=0, postmortem=None, spike_sigmas=10)]

    def loss(self, batch: Batch) -> Tensor | None:
        return self.run.net(**batch)


class Transformers:
    """transformers' Trainer as it is. `logging_nan_inf_filter` filters its log, not its steps."""

    left_out = LEFT_OUT

    def __init__(self, run: Run):
        import transformers  # noqa: F401

        self.run = run

    def train(self, windows: Sequence[Window]) -> None:
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        run = self.run

        class InOrder(Trainer):
            def _get_train_sampler(self, *_: Any) -> Any:
                return torch.utils.data.SequentialSampler(self.train_dataset)

            def compute_loss(self, model: Any, inputs: Batch, *_: Any, **__: Any) -> Any:
                return model(**inputs)

        class Averaging(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                if run.ema is not None:
                    run.ema.update_parameters(run.net)

        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                per_device_train_batch_size=1,
                num_train_epochs=1,
                max_grad_norm=run.max_norm,
                lr_scheduler_type="constant",
                remove_unused_columns=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            )
            trainer = InOrder(
                run.net,
                arguments,
                data_collator=lambda rows: rows[0],
                train_dataset=batches(windows),
                optimizers=(run.optimizer, run.scheduler),
                callbacks=[Averaging()],
            )
            trainer.remove_callback(PrinterCallback)
            trainer.train()
