"""A micro-batch from a CUDA graph has the bits of one computed as usual, or is computed as usual.

Without a card a tape stands in for the graph: it runs the recorded operations again, and nothing in
Python. What CUDA itself does with a capture is not tested here.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from operator import call
from types import SimpleNamespace
from typing import Any

import pytest
import tape
import torch
from students import load_student, make_batch, moved
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP
from windows import StudentStep

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.adapters.trained import ModulationMeter
from npt.batch import Batch
from npt.config import TARGETS
from npt.distill import graphed, local
from npt.distill.hidden_losses import HIDDEN_LOSSES, register_loss
from npt.distill.local import BatchSums
from npt.distill.step import MicroBatchSplitter, free_memory, summed
from npt.distill.strategies import STRATEGIES
from npt.hooks import WITHIN, only_looks, unfused
from npt.train.smoke import smoke_test
from npt.train.states import STATES, KeptStates

FORMS: list[dict[str, Any]] = [
    {"targets": ("gate", "up", "down")},
    {"targets": tuple(TARGETS), "active": 3, "token_rank": 5},
    {"targets": ("stream",), "active": 3, "token_rank": 2},
    {"targets": ("stream", "up"), "residual": "keep", "modulation": "multiplicative"},
]


@pytest.fixture
def card(monkeypatch) -> Any:
    """Let a CPU pass for a GPU whose graphs are tapes; `replays` counts those of all tapes."""
    state = SimpleNamespace(replays=0, tapes=0, free=1)

    def record(act: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        found, replay = tape.record(act)
        state.tapes += 1

        def counted() -> None:
            state.replays += 1
            replay()

        return found, counted

    fakes = {
        "device": nullcontext,
        "get_rng_state": torch.get_rng_state,
        "set_sync_debug_mode": lambda mode: None,
        "get_sync_debug_mode": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "max_memory_reserved": lambda: 1,
        "memory_allocated": lambda: 0,
        "mem_get_info": lambda: (state.free, 2),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphed, "record", record)
    monkeypatch.setattr(local, "takes_graphs", lambda ids: True)
    yield state
    graphed.STEPS.clear()
    gc.collect()


def student(**form: Any) -> Any:
    return moved(load_student(**form), 0.2)


def gradients(model: Any) -> list[torch.Tensor]:
    """Take the gradients of a model."""
    taken = []
    for parameter in adapter_parameters(model).values():
        assert parameter.grad is not None
        taken.append(parameter.grad)
        parameter.grad = None
    return taken


def step(model: Any, batch: Batch, config: Any = None) -> list[torch.Tensor]:
    """Return sums and gradients of a micro-batch."""
    sums = summed(model, STRATEGIES["local"], batch, config or npt.TrainConfig())
    return [sums.report, *gradients(model)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def expected(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Return what the micro-batch gives without graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "takes_graphs", lambda ids: False)
        return step(model, batch)


def proven(model: Any, kind: str = "full") -> None:
    """Take steps until a graph is in use."""
    for seed in range(graphed.SIGHTS):
        step(model, make_batch(kind, seed))
    assert graphed.STEPS[model].graph is not None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(form["targets"]))
def test_a_guarded_run_has_the_bits_of_one_without_graphs(form, card) -> None:
    """With a refused micro-batch while the graph is in use."""
    runs = []
    for with_graphs in (False, True):
        model = student(**form)
        config = npt.TrainConfig(learning_rate=1e-2, regularization_lambda=0.1)
        number = 0

        def strategy(
            model: Any, batch: Batch, config: Any, with_graphs: bool = with_graphs
        ) -> BatchSums:
            nonlocal number
            number += 1
            takes = local.takes_graphs
            local.takes_graphs = lambda ids: with_graphs
            try:
                sums = STRATEGIES["local"](model, batch, config)
            finally:
                local.takes_graphs = takes
            if number == 6:
                next(iter(adapter_parameters(model).values())).grad.mul_(float("nan"))
            return sums

        train_step = StudentStep(model, strategy, config, [1e-2] * 5)
        outcomes = []
        for window in range(5):
            outcomes += train_step.run([make_batch("full", 2 * window + i) for i in range(2)])
        outcomes += train_step.guard.flush()
        assert [len(outcome.refused) for outcome in outcomes] == [0, 0, 1, 0, 0]
        figures = torch.tensor([[outcome.loss, outcome.grad_norm] for outcome in outcomes])
        runs.append([figures, *(p.detach() for p in adapter_parameters(model).values())])
        assert card.tapes == with_graphs
    assert card.replays == 1 + 7
    assert equal(*runs)


def test_a_replay_reads_the_weights_of_now_and_returns_tensors_of_its_own(card) -> None:
    model = student()
    proven(model)
    first = step(model, make_batch("full", 7))
    kept = [each.clone() for each in first]
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.mul_(0.5)
    second = step(model, make_batch("full", 8))
    assert card.replays == 3
    assert equal(first, kept)
    assert equal(second, expected(model, make_batch("full", 8)))


def test_other_shapes_are_computed_as_usual_and_leave_the_graph(card) -> None:
    model = student()
    proven(model)
    rows = make_batch("full", 4)
    shorter = npt.batch.batch_from_tensors(rows.input_ids[:1], rows.attention_mask[:1])
    for batch in (shorter, make_batch("right"), make_batch("packed"), shorter):
        assert equal(step(model, batch), expected(model, batch))
    assert card.replays == 1
    step(model, rows)
    assert card.replays == 2


def test_a_rare_shape_does_not_replace_the_graph(card) -> None:
    """Its micro-batches are not in a row, with replays in between."""
    model = student()
    proven(model)
    full = make_batch("full", 4)
    rare = npt.batch.batch_from_tensors(full.input_ids[:1], full.attention_mask[:1])
    for batch in (rare, full, full) * graphed.SIGHTS:
        step(model, batch)
    assert card.tapes == 1 and card.replays == 1 + 2 * graphed.SIGHTS


def test_at_most_two_graphs_are_recorded(card) -> None:
    """A weight that moves makes one useless."""
    model = student()
    linear = model.model.layers[1].self_attn.q_proj
    for most in (1, 2, 2):
        for seed in range(5):
            batch = make_batch("full", seed)
            assert equal(step(model, batch), expected(model, batch))
        assert card.tapes == most
        linear.weight.data = linear.weight.data.clone()
    assert card.replays == 2 * (1 + 2)


def test_a_graph_is_recorded_on_the_gpu_of_its_model(card, monkeypatch) -> None:
    """Torch's functions are about the current one."""
    current: list[torch.device] = []
    recorded_on: list[torch.device] = []

    @contextmanager
    def device(used: torch.device) -> Iterator[None]:
        current.append(used)
        yield
        current.pop()

    def record(act: Callable[[], Any]) -> Any:
        recorded_on.extend(current)
        return tape.record(act)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(graphed, "record", record)
    proven(student())
    assert recorded_on == [torch.device("cpu")]


@contextmanager
def hooked(model: Any, register: Callable[[Any], Any]) -> Iterator[None]:
    handle = register(model)
    try:
        yield
    finally:
        handle.remove()


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value, raising=False)
        yield


class OtherMLP(LlamaMLP):
    """The same tensors, maybe another function of them."""


def look(*_: Any) -> None: ...


WATCHERS: dict[str, Callable[[Any], Any]] = {
    "hook": lambda m: hooked(
        m, lambda m: m.model.layers[0].mlp.register_forward_hook(only_looks(look))
    ),
    "hook of the embedding": lambda m: hooked(
        m, lambda m: m.model.embed_tokens.register_forward_pre_hook(look)
    ),
    "backward hook": lambda m: hooked(
        m, lambda m: m.model.layers[1].register_full_backward_hook(look)
    ),
    "hook of a weight": lambda m: hooked(
        m, lambda m: m.model.layers[1].npt.A.register_hook(lambda grad: grad)
    ),
    "hook of a gradient": lambda m: hooked(
        m, lambda m: m.model.layers[1].npt.A.register_post_accumulate_grad_hook(look)
    ),
    "observer": lambda m: attribute(m.model.layers[2].npt, "observer", look),
    "code": lambda m: attribute(m.model.layers[2].npt, "recode", lambda z: z),
    "meter": lambda m: ModulationMeter([layer.npt for _, layer in npt_layers(m)]).measuring(),
    "forward": lambda m: attribute(m.model.rotary_emb, "forward", m.model.rotary_emb.forward),
    "constant": lambda m: attribute(m.model.layers[0].input_layernorm, "variance_epsilon", 1e-3),
    "class": lambda m: attribute(m.model.layers[0].mlp, "__class__", OtherMLP),
    "shards": lambda m: attribute(m.model.layers[1], WITHIN, call),
    "unfused": lambda m: unfused(),
    "mode": lambda m: Nothing(),
    "anomaly": lambda m: torch.autograd.set_detect_anomaly(True),
    "waits are looked for": lambda m: attribute(torch.cuda, "get_sync_debug_mode", lambda: 1),
    "capture": lambda m: attribute(torch.cuda, "is_current_stream_capturing", lambda: True),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_nobody_misses_a_call(watcher, card) -> None:
    model = student()
    proven(model)
    with warnings.catch_warnings(), WATCHERS[watcher](model):
        warnings.simplefilter("ignore")  # torch's about anomaly mode
        step(model, make_batch("full"))
    assert card.replays == 1
    proven(model)  # again: torch keeps a mark of a backward hook
    assert card.replays > 1


def test_states_that_a_run_keeps_are_read_without_a_graph(card, tmp_path) -> None:
    model = student()
    proven(model)
    kept = KeptStates(tmp_path / STATES, "a base", look)
    batch = make_batch("full")
    assert equal(step(model, kept.of(batch)), expected(model, batch))
    assert card.replays == 1
    kept.close()


def test_a_meter_sees_what_it_sees_without_graphs(card) -> None:
    model = student()
    meter = ModulationMeter([layer.npt for _, layer in npt_layers(model)])
    with meter.measuring():
        expected(model, make_batch("full", 5))
    figures = meter.take()
    proven(model)
    with meter.measuring():
        step(model, make_batch("full", 5))
    assert torch.equal(meter.take(), figures) and figures.any()


def test_gradients_that_are_there_are_added_to(card) -> None:
    model = student()
    proven(model)
    batch = make_batch("full", 9)
    (_, *once) = expected(model, batch)
    for _ in range(2):
        summed(model, STRATEGIES["local"], batch, npt.TrainConfig())
    assert card.replays == 2
    assert equal(gradients(model), [grad + grad for grad in once])


def test_only_the_losses_of_npt_and_the_strategy_local_have_graphs(card) -> None:
    model = student()
    register_loss("own", lambda o, t: (o - t).square().mean(-1))
    try:
        for _ in range(4):
            step(model, make_batch("full"), npt.TrainConfig(loss="own"))
    finally:
        del HIDDEN_LOSSES["own"]
        npt.config.LOSSES.remove("own")
    other_teacher = partial(STRATEGIES["local"], teacher=student())
    for strategy in (STRATEGIES["propagated"], STRATEGIES["end_to_end"], other_teacher):
        for _ in range(4):
            summed(model, strategy, make_batch("full"), npt.TrainConfig())
            gradients(model)
    assert card.tapes == 0


def test_a_trained_weight_of_the_base_gets_its_gradient(card) -> None:
    model = student()
    norm = model.model.layers[1].post_attention_layernorm.weight.requires_grad_()
    found = []
    for _ in range(4):
        step(model, make_batch("full", 3))
        found.append(norm.grad)
        norm.grad = None
    assert card.replays == 2
    assert all(torch.equal(each, found[0]) for each in found) and found[0].any()


@contextmanager
def failing(card: Any, why: str) -> Iterator[None]:
    """Let the proof of a graph fail."""
    honest, sums = graphed.record, local.batch_sums

    def act(*arguments: Any) -> Any:
        if why == "the host waits":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if why == "random numbers":
            torch.rand(1)
        return sums(*arguments)

    def record(act: Any) -> Any:
        if why == "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        found, replay = honest(act)
        if why == "not equal":
            return found, lambda: found[-1].view(torch.int32).add_(1)
        return found, replay

    if why == "memory is short":
        card.free = 0
    with ExitStack() as stack:
        stack.enter_context(attribute(graphed, "record", record))
        stack.enter_context(attribute(local, "batch_sums", act))
        yield


@pytest.mark.parametrize(
    "why", ["the host waits", "random numbers", "out of memory", "not equal", "memory is short"]
)
def test_a_graph_that_does_not_prove_itself_is_dropped_with_one_warning(why, card) -> None:
    model = student()
    with failing(card, why):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(2):
                step(model, make_batch("full", seed))
        with pytest.warns(UserWarning, match=f"without a CUDA graph: .*{why}"):
            found = step(model, make_batch("full", 2))
    assert equal(found, expected(model, make_batch("full", 2)))
    assert graphed.STEPS[model].graph is None
    replays = card.replays
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(4):
            batch = make_batch("full", seed)
            assert equal(step(model, batch), expected(model, batch))
    assert card.replays == replays


def test_after_an_out_of_memory_error_there_are_no_graphs(card, monkeypatch) -> None:
    model = student()
    proven(model)
    monkeypatch.setattr(torch.cuda, "empty_cache", look)
    monkeypatch.setattr("npt.distill.step.wait_for", look)
    free_memory(torch.device("cuda"))
    for seed in range(4):
        step(model, make_batch("full", seed))
    assert card.replays == 1 and graphed.STEPS[model].graph is None


def test_after_an_out_of_memory_error_a_freed_graph_may_be_room_enough(card, monkeypatch) -> None:
    model = student()
    proven(model)
    done: list[str] = []
    free = partial(free_memory, torch.device("cuda"))
    monkeypatch.setattr("npt.distill.step.free_memory", lambda device: free())
    monkeypatch.setattr("npt.distill.step.wait_for", lambda device: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    splitter = MicroBatchSplitter(2)
    for samples in (2, 1):
        batch = make_batch("full", samples)
        lacking = iter([True])

        def strategy(*arguments: Any, lacking: Iterator[bool] = lacking) -> BatchSums:
            if next(lacking, False):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return STRATEGIES["local"](*arguments)

        summed(model, strategy, batch, npt.TrainConfig(), splitter)
        assert splitter.samples == samples
        if samples == 2:
            assert equal(gradients(model), expected(model, batch)[1:])
    # memory that a replay in flight uses must not be unmapped
    assert done == 2 * ["waited", "emptied"]
    assert card.replays == 1


def test_the_smoke_test_leaves_the_graphs_to_the_run(card) -> None:
    """Calibration may give the adapters other ranks, and needs the memory."""
    model = student()
    smoke_test(model, make_batch("full"), STRATEGIES["local"], npt.TrainConfig())
    assert card.tapes == 0 and not graphed.STEPS
    proven(model)


def test_a_model_goes_with_its_graph(card) -> None:
    model = student()
    proven(model)
    del model
    gc.collect()
    assert not graphed.STEPS


def test_a_cpu_has_no_graphs() -> None:
    model = student()
    for seed in range(4):
        step(model, make_batch("full", seed))
    assert model not in graphed.STEPS
