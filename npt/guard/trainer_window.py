"""The open window of a guarded Trainer: its micro-batches, and what computes survivors again.

All that the guard keeps of a Trainer, and does to it, is here, so that the class of the user gets
no method or attribute that it may have itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from npt.batch import IGNORE_INDEX
from npt.errors import ConfigError, TooManyRefusalsError
from npt.guard import generations
from npt.guard.generations import Batch, Generations, NoGenerations
from npt.guard.guard import Guard
from npt.guard.ids import refuse_bad_ids
from npt.guard.outcome import Outcome
from npt.guard.parallel import share_buffers, whole
from npt.guard.refusal import UNGUARDED, Refusal
from npt.guard.settings import trainer_settings

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer
    from transformers.trainer import Trainer

Items = Tensor | int | None
"""The targets of the whole window, by which the Trainer divides."""

# attributes that TRL changes in each forward
_COUNTED = ("_metrics", "_stored_metrics", "_total_train_tokens", "stats", *generations.COUNTED)
QUOTED = 60
"""How many characters of a refused row are logged, and at most how many of its tokens."""

_GATHERING = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


class TrainerGuard(Guard):
    """Clip by the norm of the whole model, as a Trainer does, whatever the optimizer steps."""

    whole_norm = True


class TrainerWindow:
    """The micro-batches of a Trainer's current step, from the start of training to its end.

    Args:
        trainer: a Trainer that trains.
        compute: its class's own `training_step`.
        settings: returns the user's, for the guard.
        tell: called with each outcome that has a refusal or a repair.

    Attributes:
        norm: of the gradients, once the window is closed.
        generations: those of TRL's Trainers that generate.
    """

    def __init__(
        self,
        trainer: Trainer,
        compute: Callable[..., Tensor],
        settings: Callable[[], Mapping[str, Any]],
        tell: Callable[[Outcome], None],
    ):
        self.norm: float | None = None
        self.generations = NoGenerations()
        if generations.generates(trainer):
            self.generations = Generations(trainer)
        self._trainer = trainer
        self._compute_step = compute
        self._settings = settings
        self._tell = tell
        self._guard: Guard | None = None
        self._inputs: list[Batch] = []  # its micro-batches
        self._drawn: list[Batch] = []  # the same as the Trainer drew, and so counts, them
        self._names: dict[int, tuple[object, ...]] = {}  # their sample ids, by id of the inputs
        self._logged = torch.zeros(())  # the Trainer's summed loss before it
        self._counted: Mapping[str, object] = {}  # TRL's metrics before it
        self._started = False
        self._finally = ExitStack()  # restores the optimizer's own step

    def end(self) -> None:
        """Give the optimizer its step back, and free buffers as large as the gradients."""
        self._finally.close()
        if self._guard is not None:
            self._guard.close()

    def note_drawn(self, micro_batches: Iterable[object]) -> None:
        """Keep the indices of the rows of the micro-batches, if the sampler recorded them."""
        loader = self._trainer.callback_handler.train_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        noted: deque[list[object]] = getattr(sampler, "noted", deque())
        if noted and not self._started:
            assert loader is not None
            for _ in range(self._skipped(loader)):
                noted.popleft()
        self._started = True
        self._names = {id(x): tuple(noted.popleft()) if noted else () for x in micro_batches}

    def _skipped(self, loader: DataLoader[object]) -> int:
        """Return how many micro-batches of the epoch a starting or resuming run skips."""
        trainer = self._trainer
        size = trainer.args.gradient_accumulation_steps
        steps = max(1, math.ceil(len(loader) / size))
        return 0 if trainer.args.ignore_data_skip else trainer.state.global_step % steps * size

    def step(self, guard: Guard, model: nn.Module, inputs: Batch, items: Items) -> Tensor:
        """Compute a micro-batch; after the window's last, compute survivors of a refusal again."""
        trainer = self._trainer
        if not self._inputs:
            self._begin(guard, model)
        self._drawn.append(inputs)
        inputs = self._taken(inputs)
        self._inputs.append(inputs)
        loss = self._compute(guard, model, inputs, items)
        self.generations.advance()
        is_last = trainer.accelerator.gradient_state.sync_gradients
        if not is_last:
            return loss
        # each share of the loss depends on how many count, so survivors are computed once more
        losses = None
        refused: set[int] = set()
        while refusals := guard.begin_again():
            refused |= _places(guard, refusals)
            vars(trainer).update(deepcopy(self._counted))
            losses = self._compute_again(guard, model, refused, items)
        self._inputs = []
        self.norm = guard.close_window()
        return loss if losses is None else self._logged_again(losses)

    def _begin(self, guard: Guard, model: nn.Module) -> None:
        """Note what a refusal puts back, before the first micro-batch of a window."""
        trainer = self._trainer
        share_buffers(model)
        # callbacks change it
        guard.window.max_grad_norm = trainer.args.max_grad_norm or math.inf
        self._logged = getattr(trainer, "_tr_loss", torch.zeros(())).clone()
        self._counted = _counts(trainer)
        self._drawn = []

    def _taken(self, inputs: Batch) -> Batch:
        taken = self.generations.take(len(self._inputs), inputs, self._counted)
        if taken is not inputs:
            names = self._names.get(id(inputs), ())  # for the whole generation, which TRL shuffles
            self._names[id(taken)] = tuple(dict.fromkeys(names))
        return taken

    def _compute(
        self, guard: Guard, model: nn.Module, inputs: Batch, items: Items, calls: int | None = None
    ) -> Tensor:
        loss = torch.zeros((), device=self._trainer.args.device)
        again = partial(self._once_more, model, inputs, items)
        names = self._names.get(id(inputs), ())
        with (
            guard.micro_batch(ids=names, inputs=inputs, run=again) as micro,
            self._checking_ids(inputs),
            _alone(self._trainer),
            self.generations.computing(inputs, calls),
        ):
            micro.loss = loss = self._compute_step(model, inputs, items)
        return loss

    def _checking_ids(self, inputs: Batch) -> AbstractContextManager[None]:
        trainer = self._trainer
        assert trainer.model is not None
        # a stock loss, whose labels are tokens or -100
        own = trainer.compute_loss_func is not None or trainer.label_smoother is not None
        origin = type(trainer).compute_loss.__module__.partition(".")[0]
        labels = not own and origin in ("transformers", "trl")
        return refuse_bad_ids(inputs, trainer.model, labels)

    def _once_more(self, model: nn.Module, inputs: Batch, items: Items) -> Tensor:
        with uncounted(self._trainer), self.generations.computing(inputs):
            return self._compute_step(whole(model), inputs, items)

    def _compute_again(
        self, guard: Guard, model: nn.Module, refused: set[int], items: Items
    ) -> list[Tensor]:
        """Compute the survivors as a window without the refused ones; return their losses."""
        trainer = self._trainer
        window = self._inputs
        processes = guard.window.processes
        (left,) = processes.sums([len(window) - len(refused)])
        # a Trainer divides by this, though it may be a fraction, or by `items`
        steps = left / processes.size
        trainer.current_gradient_accumulation_steps = steps  # type: ignore[assignment]
        if items is not None:
            counted = [_blank(x) if i in refused else x for i, x in enumerate(window)]
            items = trainer._get_num_items_in_batch(counted, trainer.args.device)
        losses: list[Tensor] = []
        last = max(set(range(len(window))) - refused, default=None)
        for place, inputs in enumerate(window):
            self.generations.rewind_to(place)
            if place in refused:
                self._pass_over(guard, model, inputs, items)
                continue
            trainer.accelerator.sync_gradients = place == last  # GRPO's metrics read it
            try:
                losses.append(self._compute(guard, model, inputs, items, calls=len(losses)))
            finally:
                trainer.accelerator.sync_gradients = True
        return losses

    def _pass_over(self, guard: Guard, model: nn.Module, inputs: Batch, items: Items) -> None:
        """Keep the place of a refused micro-batch, and keep no other process waiting for it."""
        # later ones keep their indices, and the other processes their partner
        guard.window.place += guard.window.processes.size
        if guard.sharding.modules and not guard.sharding.trained:
            with (  # another process may wait for its layers
                suppress(*guard.settings.refuse),
                guard.aside(),
                self._checking_ids(inputs),
            ):
                self._once_more(model, inputs, items)

    def _logged_again(self, losses: list[Tensor]) -> Tensor:
        """Replace the window's losses in the Trainer's sum; return the last one, which it adds, or
        a mean if there are none.
        """
        trainer = self._trainer
        if not hasattr(trainer, "_tr_loss"):
            return losses[-1] if losses else torch.zeros((), device=trainer.args.device)
        trainer._tr_loss.copy_(self._logged)
        if not losses:
            return self._mean_logged()
        for loss in losses[:-1]:
            trainer._tr_loss += loss
        return losses[-1]

    def _mean_logged(self) -> Tensor:
        """Return the mean loss since the last log entry, or of the whole run if no step came since:
        the entry divides by all steps, and the run's mean too.
        """
        trainer = self._trainer
        step = trainer.state.global_step
        if step > trainer._globalstep_last_logged:
            return trainer._tr_loss / (step - trainer._globalstep_last_logged)
        earlier = max(1, step - trainer._initial_global_step)
        return torch.full_like(trainer._tr_loss, trainer._total_loss_scalar / earlier)

    def guard_of(self, model: nn.Module) -> Guard:
        """Return the guard; the first call makes it and puts its `step` into the optimizer."""
        if self._guard is not None:
            return self._guard
        trainer = self._trainer
        if trainer.accelerator.distributed_type.value == "DEEPSPEED":
            raise ConfigError(
                f"DeepSpeed makes its own step; train with DDP or one process, or {UNGUARDED}"
            )
        settings = trainer_settings(self._settings(), trainer.args.output_dir or ".")
        settings["max_grad_norm"] = trainer.args.max_grad_norm or math.inf
        assert trainer.optimizer is not None
        self._guard = TrainerGuard(model, trainer.optimizer, **settings)
        self._take_over(self._guard, trainer.optimizer)
        return self._guard

    def _take_over(self, guard: Guard, optimizer: AcceleratedOptimizer) -> None:
        def step(closure: object = None) -> None:
            optimizer._opt_called = True  # schedulers read it
            held = [(p, p.grad) for p in guard.window.gradients.parameters]
            try:
                outcome = guard.step()
            except TooManyRefusalsError:
                assert guard.outcome is not None
                self._account(guard, guard.outcome)
                raise
            if outcome.applied:
                for parameter, gradient in held:  # `AdafactorSchedule` reads them
                    parameter.grad = gradient
            optimizer._is_overflow = not outcome.applied  # makes the scheduler skip this step
            self._account(guard, outcome)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        if "step" in vars(optimizer):  # a scheduler's
            self._finally.callback(setattr, optimizer, "step", optimizer.step)
        optimizer.step = step
        self._finally.callback(delattr, optimizer, "step")

    def quotes(self, refusal: Refusal) -> str:
        """Return how the first rows of a refused micro-batch begin, to find them in the data: TRL
        drops and packs rows, so their numbers are not those of the file. Empty without a tokenizer.
        """
        decode = getattr(getattr(self._trainer, "processing_class", None), "decode", None)
        if decode is None or self._guard is None:
            return ""
        rows: list[str] = []
        for place in _places(self._guard, [refusal]):
            with suppress(Exception):  # no ids, or ids that the tokenizer does not know
                rows.extend(_beginnings(self._drawn[place], decode))
        return f"; text: {', '.join(rows)}" if rows else ""

    def _account(self, guard: Guard, outcome: Outcome) -> None:
        if outcome.refused:
            self._uncount(guard, outcome)
        if outcome.refused or outcome.repaired:
            self._tell(outcome)

    def _uncount(self, guard: Guard, outcome: Outcome) -> None:
        """Take refused rows out of the tokens and operations that the Trainer has counted, and a
        window refused as a whole out of its metrics and its loss too.
        """
        trainer = self._trainer
        places = _places(guard, outcome.refused)
        whole_window = any(refusal.micro_batch is None for refusal in outcome.refused)
        if whole_window:
            places = set(range(len(self._drawn)))
        seen = trainer.state.num_input_tokens_seen
        with _alone(trainer):
            for place in places:
                operations = float(trainer.floating_point_ops(self._drawn[place]))
                trainer.current_flos -= operations  # type: ignore[assignment]  # a float
                trainer._track_num_input_tokens(self._drawn[place])
        (refused,) = guard.window.processes.sums([trainer.state.num_input_tokens_seen - seen])
        trainer.state.num_input_tokens_seen = seen - int(refused)
        if whole_window:
            vars(trainer).update(self._counted)
            trainer._tr_loss.copy_(self._logged)
            trainer._tr_loss += self._mean_logged()


def _places(guard: Guard, refusals: Iterable[Refusal]) -> set[int]:
    """Return which of this process's micro-batches in the window were refused."""
    processes = guard.window.processes
    together = guard.sharding.trained
    return {
        refusal.micro_batch // processes.size
        for refusal in refusals
        if refusal.micro_batch is not None and (together or refusal.process == processes.index)
    }


def _beginnings(inputs: Batch, decode: Callable[..., str]) -> Iterator[str]:
    """Yield how the first rows of a micro-batch begin."""
    rows = inputs["input_ids"]
    kept = inputs.get("attention_mask", torch.ones_like(rows)).bool()
    for ids, mask in zip(rows[:4], kept, strict=False):
        text = decode(ids[mask][:QUOTED].tolist(), skip_special_tokens=True)
        yield repr(text[:QUOTED])


def note_order(loader: DataLoader[object]) -> None:
    from accelerate.data_loader import DataLoaderDispatcher
    from transformers.trainer_utils import has_length

    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or hasattr(sampler, "noted"):
        return
    indexed = not isinstance(loader.dataset, IterableDataset) and has_length(loader)
    ordered = getattr(loader, "in_order", True) and not isinstance(loader, DataLoaderDispatcher)
    if not (indexed and ordered):
        return
    kind = type(sampler)

    def noting(self: object) -> Iterator[list[object]]:
        noted = vars(self)["noted"] = deque[list[object]]()
        for indices in kind.__iter__(self):
            noted.append(indices)
            yield indices

    with suppress(TypeError):  # a sampler with slots, or written in C
        # only a subclass of one base has the same layout
        sampler.__class__ = type(f"Noting{kind.__name__}", (kind,), {"__iter__": noting})


def _counts(trainer: Trainer) -> Mapping[str, object]:
    return {name: deepcopy(vars(trainer)[name]) for name in _COUNTED if name in vars(trainer)}


@contextmanager
def uncounted(trainer: Trainer) -> Iterator[None]:
    """Within the context, keep what is computed out of TRL's metrics, and wait for no process."""
    counted = _counts(trainer)
    try:
        with _alone(trainer):
            yield
    finally:
        vars(trainer).update(counted)


@contextmanager
def _alone(trainer: Trainer) -> Iterator[None]:
    """Turn accelerate's gathering off within the context; TRL uses it for metrics.

    A refused micro-batch may end early, and the other processes would wait for ever. Metrics are
    then those of the main process.
    """
    accelerator = trainer.accelerator
    names = _GATHERING if accelerator.num_processes > 1 else ()
    for name in names:
        setattr(accelerator, name, lambda value, *_, **__: value)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


def _blank(inputs: Batch) -> Batch:
    if not isinstance(inputs, Mapping):
        return inputs
    names = [name for name in ("labels", "shift_labels") if name in inputs]
    return {**inputs, **{name: torch.full_like(inputs[name], IGNORE_INDEX) for name in names}}
