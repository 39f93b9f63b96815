"""The recorder: what it sees, that it changes nothing, and that nothing of it stays."""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from students import moved
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.config import PRODUCTS, TARGETS, NPTConfig, TrainConfig
from npt.distill.strategies import STRATEGIES
from npt.recorder import observations, statistics
from npt.recorder.record import Record, Row
from npt.recorder.recorder import Recorder

NAN, INF = math.nan, math.inf


def rows(record: Record, direction: str = "forward") -> dict[str, Row]:
    """By name; a name occurs once."""
    found = [row for row in record.rows if row.direction == direction]
    assert max(Counter(row.name for row in found).values(), default=1) == 1
    return {row.name: row for row in found}


def recorded(model: nn.Module, run: Callable[[], Any], **settings: Any) -> Record:
    with Recorder(model, **settings) as recorder:
        run()
    return recorder.record()


def spaced(name: str) -> str:
    """A parameter's row: `blocks.0.linear weight`."""
    module, _, parameter = name.rpartition(".")
    return f"{module} {parameter}"


def hooks(model: nn.Module) -> int:
    """Everything that may still be looking at the model."""
    count = sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + (getattr(module, "observer", None) is not None)
        for module in model.modules()
    )
    return count + sum(len(p._backward_hooks or ()) for p in model.parameters())


def student(load_model: Callable[..., nn.Module], **config: Any) -> nn.Module:
    """An NPT model away from its start, where M = 0."""
    model = load_model()
    npt.attach(
        model, NPTConfig(**{"rank": 4, "layers": "1,3", "targets": tuple(PRODUCTS), **config})
    )
    return moved(model, 0.2)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(self.norm(x)))


class Stack(nn.Module):
    """A model of somebody else's."""

    def __init__(self, width: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture
def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


# --- what is seen


def test_every_module_has_rows_of_what_goes_in_and_comes_out(stack) -> None:
    with Recorder(stack) as recorder:
        stack(IDS).sum().backward()
    record = recorder.record(step=7, micro_batch=2)
    assert (record.step, record.micro_batch) == (7, 2)
    block = ("norm out", "linear out", "act out")
    blocks = [[*(f"blocks.{i}.{row}" for row in block), f"blocks.{i} out"] for i in (0, 1)]
    names = ["in", "embedding out", *blocks[0], *blocks[1], "head out", "out"]
    assert [row.name for row in record.rows if row.direction == "forward"] == names
    assert [row.layer for row in rows(record).values()] == [None] * 2 + [0] * 4 + [1] * 4 + [
        None
    ] * 2
    assert rows(record)["in"].dtype == "int64" and rows(record)["out"].shape == (2, 3, 3)
    values = {name for name in rows(record) if name != "in"}
    assert set(rows(record, "gradient")) == values | {
        spaced(name) for name, _ in stack.named_parameters()
    }


def test_rows_hold_the_statistics_of_the_tensors_themselves(stack) -> None:
    kept: dict[str, Tensor] = {}
    x = stack.embedding(IDS)
    for index, block in enumerate(stack.blocks):
        kept[f"blocks.{index}.norm out"] = block.norm(x)
        kept[f"blocks.{index}.linear out"] = block.linear(kept[f"blocks.{index}.norm out"])
        kept[f"blocks.{index}.act out"] = block.act(kept[f"blocks.{index}.linear out"])
        kept[f"blocks.{index} out"] = x = x + kept[f"blocks.{index}.act out"]
    kept["head out"] = stack.head(x)
    for tensor in kept.values():
        tensor.retain_grad()
    kept["head out"].square().sum().backward()
    stack.zero_grad()
    record = recorded(stack, lambda: stack(IDS).square().sum().backward())
    for direction in ("forward", "gradient"):
        found = rows(record, direction)
        for name, tensor in kept.items():
            values = tensor.detach() if direction == "forward" else tensor.grad
            row, rms = found[name], float(values.square().mean().sqrt())
            # The sums of squares of a few numbers, in another order.
            assert row.rms == pytest.approx(rms, rel=1e-5), name
            assert (row.absmax, row.min) == (float(values.abs().max()), float(values.min())), name
            assert row.norm == pytest.approx(float(values.norm()), rel=1e-5)
            assert row.count == values.numel()
    for name, parameter in stack.named_parameters():
        assert rows(record, "gradient")[spaced(name)].absmax == float(parameter.grad.abs().max())


def test_a_row_points_to_what_it_was_made_from(stack) -> None:
    record = recorded(stack, lambda: stack(IDS))
    made_from = {
        row.name: record.rows[row.source].name for row in record.rows if row.source is not None
    }
    # Neither the embedding nor the normalisations, and not the model, whose input is no activation.
    blocks = [
        {
            f"blocks.{i}.linear out": f"blocks.{i}.norm out",
            f"blocks.{i}.act out": f"blocks.{i}.linear out",
            f"blocks.{i} out": before,
        }
        for i, before in enumerate(("embedding out", "blocks.0 out"))
    ]
    assert made_from == {**blocks[0], **blocks[1], "head out": "blocks.1 out"}
    found = rows(record)
    ratio = found["blocks.1.act out"].rms / found["blocks.0 out"].rms
    # x + a - x is rounded
    assert found["blocks.1 out"].update_ratio == pytest.approx(ratio, rel=1e-4)
    updates = [name for name, row in found.items() if row.update_ratio is not None]
    assert updates == ["blocks.0 out", "blocks.1 out"]


def test_a_tensor_is_reduced_once_however_many_modules_name_it(
    load_model, batch, monkeypatch
) -> None:
    reduced: list[Tensor] = []
    original = observations.summarise
    monkeypatch.setattr(
        observations, "summarise", lambda t, valid: reduced.append(t) or original(t, valid)
    )
    model = load_model()
    with Recorder(model, gradients=False) as recorder, torch.no_grad():
        model(batch.input_ids)
    found = rows(recorder.record())
    names = ("self_attn.q_proj in", "self_attn.k_proj in", "mlp.up_proj in", "mlp in")
    assert not any(f"model.layers.2.{name}" in found for name in names)
    assert found["model.layers.2.mlp out"].rms == found["model.layers.2.mlp.down_proj out"].rms
    places = Counter((t.data_ptr(), t.shape, t._version, id(t)) for t in reduced)
    assert max(places.values()) == 1  # they are all alive in `reduced`, so no memory was used twice
    updates = 4
    assert len(reduced) < len(found) + updates


def test_what_was_changed_in_place_is_another_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with Recorder(model) as recorder, context():
            model(x)
        found = rows(recorder.record())
        assert found["0 out"].min < 0 and found["1 out"].min == 0 and found["out"].min == 0


def test_a_tensor_outside_the_graph_is_not_taken_for_its_twin_inside() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outside, self.inside = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            doubled = 2 * x
            twin = doubled.detach()
            self.outside(twin)
            return self.inside(doubled)

    model = Twins()
    x = torch.ones(1, 2, requires_grad=True)
    assert "inside in" in rows(recorded(model, lambda: model(x).sum().backward()), "gradient")


class Odd(nn.Module):
    """Hands on everything that a module may be called with and return."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return kwargs.get("give", args)


@dataclass
class Output:
    loss: Tensor
    hidden: tuple[Tensor, ...]
    cache: object = None


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, ["in"]),
        ("text", ["in"]),
        ([None, torch.ones(2)], ["in", "in.give.1", "out.1"]),
        ((torch.ones(2), torch.zeros(3), None), ["in", "in.give.0", "in.give.1", "out"]),
        (
            {"a": torch.ones(2), "b": {"c": torch.zeros(1)}},
            ["in", "in.give.a", "in.give.b.c", "out.a"],
        ),
        (
            Output(torch.ones(()), (torch.zeros(2),)),
            ["in", "in.give.loss", "in.give.hidden.0", "out.loss"],
        ),
        (torch.empty(0, 3), ["in", "in.give", "out"]),
        pytest.param(object(), ["in"], id="an object"),
    ],
    ids=repr,
)
def test_modules_may_take_and_return_anything(given, names) -> None:
    model = Odd()
    with Recorder(model) as recorder:
        result = model(torch.ones(1), give=given)
    assert result is given
    assert [row.name for row in recorder.record().rows] == names


def test_masks_are_left_out_and_other_arguments_are_named() -> None:
    class Attends(nn.Module):
        def forward(self, query: Tensor, attention_mask: Tensor, scale: Tensor) -> Tensor:
            return query * scale

    model = Attends()
    mask = torch.full((2, 2), -INF)
    run = partial(model, torch.ones(2, 2), mask, scale=torch.ones(2))
    assert [row.name for row in recorded(model, run).rows] == ["in", "in.scale", "out"]


def test_later_calls_of_a_module_in_a_pass_are_numbered() -> None:
    linear = nn.Linear(3, 3)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    record = recorded(model, lambda: model(torch.ones(2, 3)).sum().backward())
    assert list(rows(record)) == ["in", "0 out", "1 out", "0 out#2", "out"]
    gradients = {"out", "0 out#2", "1 out", "0 out", "0 weight", "0 bias"}
    assert set(rows(record, "gradient")) == gradients


def test_a_second_backward_through_the_same_tensor_is_numbered() -> None:
    model = nn.Linear(3, 1, bias=False)
    with Recorder(model) as recorder:
        out = model(torch.ones(2, 3)).sum()
        out.backward(retain_graph=True)
        out.backward()
    assert set(rows(recorder.record(), "gradient")) == {"out", "weight", "out@2", "weight@2"}


def test_a_parameters_gradient_is_that_of_this_pass_alone(stack) -> None:
    stack(IDS).sum().backward()
    norm = float(stack.head.weight.grad.norm())
    found = rows(recorded(stack, lambda: stack(IDS).sum().backward()), "gradient")
    assert found["head weight"].norm == pytest.approx(norm, rel=1e-5)


def test_numbers_that_are_not_finite_are_counted_where_they_are(stack) -> None:
    with torch.no_grad():
        stack.blocks[1].linear.bias[0] = NAN
    record = recorded(stack, lambda: stack(IDS).sum().backward())
    first = next(row for row in record.rows if not row.finite)
    assert (first.name, first.nan, first.count) == ("blocks.1.linear out", 6, 36)
    assert rows(record)["blocks.0 out"].finite and rows(record)["head out"].nan == 18
    assert rows(record)["head out"].rms is None and rows(record)["head out"].norm is None
    text = json.dumps(record.as_dict(), allow_nan=False)
    assert Record.from_dict(json.loads(text)) == record


def test_gradients_can_be_left_out_and_frozen_parameters_have_none(stack) -> None:
    def run() -> None:
        stack(IDS).sum().backward()

    assert not rows(recorded(stack, run, gradients=False), "gradient")
    stack.head.weight.requires_grad_(False)
    found = rows(recorded(stack, run), "gradient")
    assert "head bias" in found and "head weight" not in found


def test_a_mask_of_another_shape_and_a_second_entry_are_refused(stack) -> None:
    with pytest.raises(ValueError, match=r"valid has the shape \(3,\): pass a mask"):
        Recorder(stack, valid=torch.ones(3))
    with Recorder(stack) as recorder, pytest.raises(RuntimeError, match="already active"):
        recorder.__enter__()
    assert hooks(stack) == 0


# --- contexts


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_forward_rows_are_the_same(load_model, batch, context) -> None:
    model = load_model()

    def record(within: Callable[[], Any]) -> dict[str, Row]:
        with Recorder(model) as recorder, within():
            model(batch.input_ids, attention_mask=batch.attention_mask)
        return rows(recorder.record())

    full, found = record(torch.enable_grad), record(context)
    for name, row in full.items():
        same = found[name]
        assert (row.shape, row.rms, row.update_ratio) == (same.shape, same.rms, same.update_ratio)


def test_mixed_precision_is_seen_as_it_is(stack) -> None:
    plain = copy.deepcopy(stack)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(IDS)
        expected.float().sum().backward()
        with Recorder(stack) as recorder:
            found = stack(IDS)
            found.float().sum().backward()
    record = recorder.record()
    assert torch.equal(found, expected)
    for p, q in zip(stack.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    row = rows(record)["head out"]
    assert row.dtype == "bfloat16"
    assert rows(record, "gradient")["head weight"].dtype == "float32"
    # The row is of the numbers as bf16 has them, but nothing is summed in bf16.
    rms = float(expected.detach().double().square().mean().sqrt())
    assert row.rms == pytest.approx(rms, rel=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_of_gradient_checkpointing_is_a_second_call(stack, reentrant) -> None:
    def forward(model: Stack) -> Tensor:
        x = model.embedding(IDS)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.head(x)

    plain = copy.deepcopy(stack)
    forward(plain).square().sum().backward()
    record = recorded(stack, lambda: forward(stack).square().sum().backward())
    for one, other in zip(stack.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    found, again = rows(record), rows(record, "gradient")
    assert found["blocks.1.linear out#2"].rms == found["blocks.1.linear out"].rms
    # Only the graph that is walked has gradients: with re-entrance that of the second call.
    assert ("blocks.1.linear out#2" in again) == reentrant
    assert ("blocks.1.linear out" in again) != reentrant and hooks(stack) == 0


def test_a_sparse_gradient_is_skipped_and_said() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    with Recorder(model) as recorder:
        model(torch.tensor([1, 1])).sum().backward()
    with pytest.warns(match="1 tensors were not recorded, the first: gradient of weight: TypeErr"):
        record = recorder.record()
    assert {row.name for row in record.rows} == {"in", "out"}
    assert model.weight.grad.is_sparse


def test_a_failure_of_the_recorder_does_not_reach_the_pass(stack, monkeypatch) -> None:
    def broken(*_: Any) -> Tensor:
        raise ValueError("broken")

    monkeypatch.setattr(observations, "summarise", broken)
    with Recorder(stack) as recorder:
        stack(IDS).sum().backward()
    assert stack.head.weight.grad is not None and hooks(stack) == 0
    with pytest.warns(match="tensors were not recorded, the first: in: ValueError: broken"):
        assert recorder.record().rows == ()


# --- padding


def test_padding_is_left_out_by_the_models_mask_or_a_given_one(load_model, batch) -> None:
    model = load_model()
    valid = batch.attention_mask.bool()
    with torch.no_grad():
        with Recorder(model) as recorder:
            states = model(
                batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True
            ).hidden_states
        own = rows(recorder.record())
        run = partial(model, batch.input_ids, attention_mask=batch.attention_mask)
        given = rows(recorded(model, run, valid=valid))
    row = own["model.layers.1 out"]
    assert row.count == batch.tokens * 64 and row.shape == (3, 9, 64)
    assert row.rms == pytest.approx(float(states[2][valid].square().mean().sqrt()), rel=1e-5)
    update = (states[2] - states[1])[valid]
    ratio = float(update.norm() / states[1][valid].norm())
    assert row.update_ratio == pytest.approx(ratio, rel=1e-5)
    assert {name: row.rms for name, row in given.items()} == {name: own[name].rms for name in given}


def test_junk_at_padding_is_nobodys_business() -> None:
    model = nn.Linear(3, 3)
    x = torch.ones(2, 4, 3)
    x[1, 2:] = NAN
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    with Recorder(model, valid=valid) as recorder:
        out = model(x)
        out[valid].sum().backward()
    record = recorder.record()
    forward, gradient = rows(record), rows(record, "gradient")
    assert forward["in"].finite and forward["out"].finite and gradient["out"].finite
    assert forward["out"].count == 18
    # 0 * NaN: this is what it does to the weights, and so it is shown
    assert not gradient["weight"].finite


# --- NPT layers

STAGES = "h a z m_gate s_gate gate m_up s_up up activation product m_down s_down mlp o".split()  # noqa: SIM905


def stages(record: Record, layer: int, direction: str = "forward") -> list[str]:
    return [
        row.stage
        for row in record.rows
        if row.module == f"model.layers.{layer}.npt" and row.direction == direction
    ]


def test_local_strategy_records_stages_and_the_teachers_output(load_model, batch) -> None:
    model = student(load_model)
    run = partial(STRATEGIES["local"], model, batch, TrainConfig())
    record = recorded(model, run, valid=batch.attention_mask.bool())
    for layer in (1, 3):
        assert stages(record, layer) == [*STAGES, "t"]
        matrices = (f"{p}.{t}" for p in "BM" for t in ("gate", "up", "down"))
        gradients = {"z", *STAGES[3:], "A", *matrices}
        assert set(stages(record, layer, "gradient")) == gradients
    found = rows(record)
    assert all(row.finite for row in record.rows)
    assert found["model.layers.1.npt h"].count == batch.tokens * 64
    assert found["model.layers.1.npt gate"].shape == (batch.tokens, 128)
    assert found["model.layers.1.mlp.gate_proj out"].shape == (batch.tokens, 128)
    m_up = found["model.layers.1.npt m_up"]
    assert 0.5 <= m_up.min < 1 < m_up.max <= 1.5
    o, h, mlp = (found[f"model.layers.3.npt {stage}"] for stage in ("o", "h", "mlp"))
    assert o.update_ratio == pytest.approx(mlp.rms / h.rms, rel=1e-4)  # h + mlp - h is rounded
    assert record.rows[o.source] == h and found["model.layers.3.npt t"].update_ratio > 0
    for name, parameter in adapter_parameters(model).items():
        module, _, stage = name.partition(".npt.")
        absmax = rows(record, "gradient")[f"{module}.npt {stage}"].absmax
        assert absmax == float(parameter.grad.abs().max())


def test_end_to_end_strategy_records_teacher_and_student_as_two_calls(load_model, batch) -> None:
    model = student(load_model)
    with Recorder(model) as recorder:
        STRATEGIES["end_to_end"](
            model, batch, TrainConfig(strategy="end_to_end", logit_kl_weight=0.5)
        )
    record = recorder.record()
    assert stages(record, 1) == STAGES and stages(record, 3) == STAGES
    found = rows(record)
    assert {"model.layers.2.mlp.gate_proj out", "model.layers.2.mlp.gate_proj out#2"} <= set(found)
    assert found["model.layers.0 out"].update_ratio > 0 and "model.layers.0 out#2" not in found
    gradients = rows(record, "gradient")
    assert "model.layers.2 out#2" in gradients and "model.layers.2 out" not in gradients


TOKEN_PART = {"targets": tuple(TARGETS), "active": 2, "token_rank": 3}


@pytest.mark.parametrize(
    ("config", "missing", "more"),
    [
        (
            {"targets": ("gate",), "modulation": "additive"},
            {"m_gate", "m_up", "s_up", "m_down", "s_down"},
            set(),
        ),
        (
            {"targets": ("up", "down"), "modulation": "multiplicative"},
            {"m_gate", "s_gate", "s_up", "s_down"},
            set(),
        ),
        ({"residual": "keep", "targets": tuple(PRODUCTS)}, set(), {"stream"}),
        ({"targets": tuple(TARGETS)}, set(), {"s_stream", "stream"}),
        (TOKEN_PART, set(), {"l", "u", "s_stream", "stream"}),
    ],
)
def test_a_layer_has_the_stages_of_its_form(load_model, batch, config, missing, more) -> None:
    model = student(load_model, **config)
    record = recorded(model, lambda: model(batch.input_ids).logits.sum().backward())
    assert set(stages(record, 1)) == (set(STAGES) - missing) | more
    found = rows(record)
    assert found["model.layers.1 out"].rms == found["model.layers.1.npt o"].rms
    o = found["model.layers.1.npt o"]
    assert found["model.layers.1 out"].update_ratio == o.update_ratio > 0
    assert all(row.finite for row in record.rows)
    shown = [stage for stage in stages(record, 1) if stage in ("h", "a", "l", "u", "z", "stream")]
    assert shown == sorted(shown, key=["h", "a", "l", "u", "z", "stream"].index)


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
@pytest.mark.parametrize(
    ("config", "parameter", "first"),
    [
        ({}, "A", "z"),
        ({}, "M.gate", "m_gate"),
        ({}, "B.gate", "s_gate"),
        ({}, "B.up", "s_up"),
        ({}, "M.down", "m_down"),
        ({}, "B.down", "s_down"),
        (TOKEN_PART, "b", "l"),
        (TOKEN_PART, "L_in", "l"),
        (TOKEN_PART, "L_out", "l"),
        (TOKEN_PART, "A", "u"),
        (TOKEN_PART, "B.stream", "s_stream"),
    ],
)
def test_the_first_bad_row_is_of_the_stage_that_made_the_bad_number(
    load_model, batch, strategy, config, parameter, first
) -> None:
    model = student(load_model, **config)
    with torch.no_grad():
        npt_layers(model)[1][1].npt.get_parameter(parameter).view(-1)[0] = NAN
    with Recorder(model) as recorder:
        STRATEGIES[strategy](model, batch, TrainConfig(strategy=strategy))
    assert recorder.record().bad[0].name == f"model.layers.3.npt {first}"


@pytest.mark.parametrize(
    ("form", "share"), [("half_sigmoid", 1.0), ("one_plus_tanh", 1.0), ("unbounded", 0.0)]
)
def test_saturation_is_of_the_range_of_the_form(load_model, batch, form, share) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1", mult_form=form))
    adapter = npt_layers(model)[0][1].npt
    with torch.no_grad():
        adapter.M["gate"].zero_()
        adapter.M["up"].fill_(1.0)
        adapter.A.mul_(1e6)
    with Recorder(model) as recorder, torch.no_grad():
        model(batch.input_ids)
    found = rows(recorder.record())
    # the middle of a range, though it is not 1
    assert found["model.layers.1.npt m_gate"].saturation == 0.0
    # a code may be next to 0 by chance
    assert found["model.layers.1.npt m_up"].saturation == pytest.approx(share, abs=0.01)


# --- nothing is changed, nothing stays


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_losses_and_gradients_are_bit_equal_with_and_without_it(
    load_model, batch, strategy
) -> None:
    model = student(load_model)
    config = TrainConfig(
        strategy=strategy,
        regularization_lambda=0.3,
        logit_kl_weight=0.5 if strategy == "end_to_end" else 0.0,
    )
    results = []
    for watched in (False, True, False):
        for parameter in adapter_parameters(model).values():
            parameter.grad = None
        state = torch.get_rng_state()
        if watched:
            with Recorder(model) as recorder:
                sums = STRATEGIES[strategy](model, batch, config)
            assert len(recorder.record().rows) > 100
        else:
            sums = STRATEGIES[strategy](model, batch, config)
        assert torch.equal(torch.get_rng_state(), state)
        gradients = (p.grad.clone() for p in adapter_parameters(model).values())
        results.append([sums.loss, sums.layer_nmse, sums.logit, *gradients])
    for plain, recorded, after in zip(*results, strict=True):
        assert torch.equal(plain, recorded) and torch.equal(plain, after)


def test_no_hook_is_left_however_the_block_ends(load_model, batch) -> None:
    model = student(load_model)
    assert hooks(model) == 0
    with Recorder(model):
        assert hooks(model) > 100
        STRATEGIES["local"](model, batch, TrainConfig())
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError), Recorder(model):
        model(batch.input_ids)
        raise ZeroDivisionError
    assert hooks(model) == 0
    with pytest.raises(RuntimeError), Recorder(model):
        model.model.layers[0].mlp(torch.ones(1, 3))  # of a width that does not fit
    assert hooks(model) == 0


def test_a_graph_that_outlives_the_block_is_not_watched_any_more(stack) -> None:
    with Recorder(stack) as recorder:
        loss = stack(IDS).sum()
    loss.backward()
    assert not rows(recorder.record(), "gradient")


def test_hooks_and_observers_of_others_see_the_same_and_stay(load_model, batch) -> None:
    model = student(load_model)
    seen: list[str] = []
    adapter = npt_layers(model)[0][1].npt
    adapter.observer = mine = lambda stages: seen.extend(stages)
    model.lm_head.register_forward_hook(lambda *_: seen.append("forward"))
    adapter.A.register_hook(lambda _: seen.append("gradient"))
    for _ in range(2):
        with Recorder(model):
            model(batch.input_ids).logits.sum().backward()
        assert adapter.observer is mine
        stages = [s for s in seen if s not in ("s_stream", "stream")]
        assert stages == [*STAGES, "forward", "gradient"]
        seen.clear()


def test_recorders_nest_and_can_be_used_again(load_model, batch) -> None:
    model = student(load_model)
    outer, inner = Recorder(model), Recorder(model)
    with torch.no_grad(), outer:
        with inner:
            model(batch.input_ids)
        model(batch.input_ids)
    assert hooks(model) == 0
    once, twice = inner.record(), outer.record()
    assert [r for r in twice.rows if "#" not in r.stage][: len(once.rows)] == list(once.rows)
    assert len(twice.rows) > 1.5 * len(once.rows)
    with torch.no_grad(), inner:
        model(batch.input_ids)
    assert inner.record() == once


def test_record_reads_what_came_since_the_last_one(stack) -> None:
    with Recorder(stack) as recorder:
        loss = stack(IDS).sum()
        forward = recorder.record()
        loss.backward()
        backward = recorder.record()
        stack(IDS)
        again = recorder.record()
    assert {row.direction for row in forward.rows} == {"forward"}
    assert {row.direction for row in backward.rows} == {"gradient"}
    assert again.rows == forward.rows
    assert recorder.record().rows == ()


def test_nothing_of_a_pass_is_kept_alive(stack) -> None:
    import gc
    import weakref

    alive: list[weakref.ref[Tensor]] = []
    stack.head.register_forward_hook(lambda module, args, output: alive.append(weakref.ref(output)))
    with Recorder(stack) as recorder:
        stack(IDS).sum().backward()
        gc.collect()
        assert alive[0]() is None
    recorder.record()


class ScalarReads(TorchDispatchMode):
    """Tensor values read one by one: each of them would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.count += func in (aten._local_scalar_dense.default, aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_where_reading_would_wait_nothing_is_read_before_the_record(
    load_model, batch, monkeypatch
) -> None:
    model = student(load_model)
    valid = batch.attention_mask.bool()
    read = recorded(model, lambda: STRATEGIES["local"](model, batch, TrainConfig()), valid=valid)
    monkeypatch.setattr(statistics, "_readable", lambda values: False)  # as on a GPU

    def reads() -> int:
        with ScalarReads() as counted:
            STRATEGIES["local"](model, batch, TrainConfig())
        return counted.count

    plain = reads()
    with Recorder(model, valid=valid) as recorder:
        assert reads() == plain
    for row, same in zip(recorder.record().rows, read.rows, strict=True):
        for name in ("name", "count", "min", "max", "saturation"):
            assert getattr(row, name) == getattr(same, name)
        # the same sums in another precision and order
        assert row.rms == pytest.approx(same.rms, rel=1e-5)
