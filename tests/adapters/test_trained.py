"""What a layer gives in training, by hand, against its plain form; who may look, who may change,
and how often a weight is unpacked.
"""

import gc
import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from students import moved
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from updates import random_patch

import npt
from npt.adapters import trained
from npt.adapters.converted import decoder_layers
from npt.adapters.trained import is_fusable, trained_output
from npt.base.patched import set_patch
from npt.batch import batch_from_tensors
from npt.config import TARGETS, NPTConfig, TrainConfig
from npt.distill.strategies import drive
from npt.doctor.measure import peak_bytes
from npt.hooks import only_looks, unfused
from npt.packed import quantized_linears

N, D, F = 11, 64, 128
FORMS = [
    NPTConfig(rank=4, layers="all", targets=("gate", "up", "down")),
    NPTConfig(rank=3, layers="all", targets=("gate",), modulation="additive"),
    NPTConfig(rank=3, layers="all", targets=("up", "down"), modulation="multiplicative"),
    NPTConfig(rank=5, layers="all", targets=("down",), additive_scale=1.0),
    NPTConfig(rank=4, layers="all", residual="keep"),
    NPTConfig(rank=4, layers="all", targets=("stream",)),
    NPTConfig(rank=5, layers="all", targets=tuple(TARGETS), additive_scale=0.7),
    NPTConfig(rank=3, layers="all", targets=("stream", "gate"), modulation="multiplicative"),
    NPTConfig(rank=4, layers="all", targets=("stream", "up"), residual="keep"),
    NPTConfig(rank=8, layers="all", active=3, token_rank=5),
    NPTConfig(rank=8, layers="all", active=3, targets=("stream",)),
    NPTConfig(rank=4, layers="all", token_rank=2, targets=("stream", "gate")),
]
every_form = pytest.mark.parametrize(
    "form",
    FORMS,
    ids=lambda c: f"{c.modulation}-{'+'.join(c.targets)}-{c.residual}-{c.active}-{c.token_rank}",
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def student(load_model: Any, form: NPTConfig = FORMS[0], quantization: str | None = "nf4") -> Any:
    model = load_model(quantization)
    npt.attach(model, form)
    return moved(model, 0.2)


def run(layer: Any, regularised: bool = True, teach: bool = False, graph: bool = False) -> list:
    """Return outputs and gradients of the adapter, and of h and a if these have a graph."""
    hidden, attention = (normal(seed, N, D).requires_grad_(graph) for seed in (0, 1))
    for parameter in layer.npt.parameters():
        parameter.grad = None
    output, energy, target = trained_output(layer, hidden, attention, teach=teach)
    loss = (output * normal(2, N, D)).sum()
    if regularised:
        loss = loss + (energy * normal(3, N)).sum()
    loss.backward()
    grads = [p.grad for p in layer.npt.parameters()] + (
        [hidden.grad, attention.grad] if graph else []
    )
    return [part.detach() for part in (target, output, energy, *grads) if part is not None]


every_case = pytest.mark.parametrize(
    ("teach", "graph"),
    [(True, False), (False, False), (False, True)],
    ids=["with its teacher", "alone", "in a graph"],
)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        # fp32 sums of up to 128 terms in other blocks, relative to the largest entry, because
        # single ones may cancel
        assert float((one - other).abs().max()) <= 2e-5 * float(other.abs().max())


@every_case
@every_form
@pytest.mark.parametrize(("quantization", "regularised"), [("nf4", True), (None, False)])
def test_it_is_the_plain_form(load_model, form, quantization, teach, graph, regularised):
    layer = decoder_layers(student(load_model, form, quantization))[1]
    found = run(layer, regularised, teach, graph)
    with unfused():
        assert_same(found, run(layer, regularised, teach, graph))


def with_patches(mlp: Any) -> None:
    for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        set_patch(part, random_patch(part))


def with_biases(mlp: Any) -> None:
    for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        part.bias = nn.Parameter(normal(6, part.out_features), requires_grad=False)


@every_case
@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("change", [with_patches, with_biases])
def test_patches_and_biases_of_the_frozen_weights_are_part_of_it(
    load_model, teach, graph, quantization, change
):
    layer = decoder_layers(student(load_model, quantization=quantization))[1]
    without = run(layer, True, teach, graph)
    change(layer.mlp)
    found = run(layer, True, teach, graph)
    with unfused():
        assert_same(found, run(layer, True, teach, graph))
    assert not torch.allclose(found[0], without[0], atol=0.1)


class Watching(nn.Module):
    """All that an observer and the hooks of every module are shown; gradients of stages are asked
    for.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.stages: dict[str, Tensor | None] = {}
        self.gradients: dict[str, Tensor] = {}
        self.called = Counter[str]()
        layer.npt.observer = self.see
        for name, module in layer.named_modules():
            module.register_forward_hook(
                only_looks(lambda *_, name=name: self.called.update([name]))
            )

    def see(self, stages: dict[str, Tensor | None]) -> None:
        self.stages.update(stages)
        for name, stage in stages.items():
            if stage is not None and stage.requires_grad:
                stage.register_hook(lambda g, name=name: self.gradients.update({name: g}))


@every_case
@every_form
def test_an_observer_changes_no_bit_and_sees_the_plain_forms_stages(load_model, form, teach, graph):
    regularised = teach or graph
    layer = decoder_layers(student(load_model, form))[1]
    unseen = run(layer, regularised, teach, graph)
    seen = Watching(layer)
    found = run(layer, regularised, teach, graph)
    assert all(torch.equal(one, other) for one, other in zip(found, unseen, strict=True))
    other_layer = decoder_layers(student(load_model, form))[1]
    plain = Watching(other_layer)
    with unfused():
        run(other_layer, regularised, teach, graph)
    assert list(seen.stages) == list(plain.stages)
    assert seen.gradients.keys() >= plain.gradients.keys() - {"a"}
    for name, stage in plain.stages.items():
        assert (stage is None) == (seen.stages[name] is None)
        if stage is not None:
            assert_same([seen.stages[name].detach()], [stage.detach()])  # type: ignore[union-attr]
    for name in plain.gradients.keys() & seen.gradients.keys():
        assert_same([seen.gradients[name]], [plain.gradients[name]])
    assert seen.called.keys() == plain.called.keys()


@every_case
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_a_hook_that_changes_a_product_changes_the_result(load_model, teach, graph, part):
    layer = decoder_layers(student(load_model))[1]
    before = run(layer, True, teach, graph)
    getattr(layer.mlp, part).register_forward_hook(lambda _, __, output: 1.5 * output)
    found = run(layer, True, teach, graph)
    with unfused():
        assert_same(found, run(layer, True, teach, graph))
    assert not torch.allclose(found[0], before[0], atol=1e-2)


def test_only_silu_in_fp32_outside_of_autocast_is_computed_by_hand(load_model):
    layer: Any = decoder_layers(student(load_model))[1]
    x = normal(0, N, D)
    assert is_fusable(layer, x) and not is_fusable(layer, x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_fusable(layer, x)
    with unfused():
        assert not is_fusable(layer, x)
    layer.mlp.gate_proj.compute_dtype = torch.bfloat16
    assert not is_fusable(layer, x)
    layer.mlp.gate_proj.compute_dtype = torch.float32
    layer.mlp.act_fn = nn.GELU()
    assert not is_fusable(layer, x)


@pytest.mark.parametrize("teach", [True, False])
def test_a_graph_that_outlives_its_backward_holds_no_dense_weight(load_model, monkeypatch, teach):
    made = []

    def watched(module: Any, dtype: torch.dtype) -> Tensor:
        weight = dense(module, dtype)
        made.append(weakref.ref(weight))
        return weight

    dense = trained.product_weight
    monkeypatch.setattr(trained, "product_weight", watched)
    layer = decoder_layers(student(load_model))[0]
    output, _, _ = trained_output(layer, normal(0, N, D), normal(1, N, D), teach=teach)
    gc.collect()
    # gate and up are gone, down waits for backward
    assert [ref() is not None for ref in made] == [False, False, True]
    output.sum().backward()
    gc.collect()
    assert made[2]() is None and output.requires_grad


class Unpacked(TorchDispatchMode):
    """Counts how often each packed weight is dequantised, alone or as part of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = {"dequantize_4bit": 0, "gemm_4bit": 1}.get(
            func._schema.name.removeprefix("bitsandbytes::")
        )
        if place is not None:
            self.count[args[place].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("strategy", "own", "expected"),
    [
        # by layer: attention's four, gate, up, down
        ("local", {}, {0: (1, 1, 1, 1), 1: (1, 1, 1, 1), 2: (1, 1, 1, 1), 3: (0, 0, 0, 0)}),
        ("propagated", {}, {0: (1, 1, 1, 1), 1: (2, 2, 2, 2), 2: (2, 2, 2, 2), 3: (0, 0, 0, 0)}),
        # teacher, student, and where the gradient passes through once more: in the first converted
        # layer it does through down alone
        ("end_to_end", {}, {0: (1, 1, 1, 1), 1: (2, 2, 2, 2), 2: (3, 3, 3, 3), 3: (0, 0, 0, 0)}),
        (
            "end_to_end",
            {"logit_kl_weight": 0.5},
            {0: (1, 1, 1, 1), 1: (2, 2, 2, 2), 2: (3, 3, 3, 3), 3: (3, 3, 3, 3)},
        ),
    ],
)
@pytest.mark.parametrize("residual", ["modulate", "keep"])
def test_a_packed_weight_is_dequantised_no_more_often_than_needed(
    load_model, batch, strategy, own, expected, residual
):
    form = NPTConfig(rank=4, layers="1-2", residual=residual, targets=("gate", "up", "down"))
    assert_unpacked(
        student(load_model, form), batch, TrainConfig(strategy=strategy, **own), expected
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # gradients pass gate and up in every converted layer; down_proj's weight is kept with the
        # teacher's rows, whose next step is its backward
        ("local", {1: (1, 2, 2, 1), 2: (1, 2, 2, 1)}),
        ("propagated", {1: (2, 3, 3, 3), 2: (2, 3, 3, 3)}),
        ("end_to_end", {1: (2, 3, 3, 3), 2: (3, 3, 3, 3)}),
    ],
)
def test_with_the_stream_gate_and_up_are_dequantised_once_more(
    load_model, batch, strategy, expected
):
    form = NPTConfig(rank=4, layers="1-2")
    assert_unpacked(student(load_model, form), batch, TrainConfig(strategy=strategy), expected)


def assert_unpacked(model: Any, batch: Any, config: TrainConfig, expected: Any) -> None:
    with Unpacked() as unpacked:
        drive(model, batch, config)
    found: dict[int, list[int]] = {index: [] for index in range(4)}
    for name, module in quantized_linears(model):
        found[int(name.split(".")[2])].append(unpacked.count[module.weight.data_ptr()])
    for index, (attention, gate, up, down) in expected.items():
        assert found[index] == [*[attention] * 4, gate, up, down], f"layer {index}"


@pytest.mark.parametrize("teach", [True, False])
@pytest.mark.parametrize("regularised", [True, False])
def test_with_down_alone_nothing_goes_back_through_the_mlp(
    load_model, monkeypatch, teach, regularised
):
    layer = decoder_layers(student(load_model, NPTConfig(rank=4, layers="all", targets=("down",))))[
        1
    ]
    expected = run(layer, regularised, teach)
    back: list[str] = []
    backward = trained.TorchModulation.backward

    def watched(modulation: Any, *arguments: Any) -> Any:
        assert len(modulation.products) == 1, "of gate and up"
        return backward(modulation, *arguments)

    monkeypatch.setattr(trained.TorchModulation, "backward", watched)
    monkeypatch.setattr(trained, "multiply_backward", lambda *_, **__: back.append("through down"))
    found = run(layer, regularised, teach)
    assert back == [] and all(
        torch.equal(one, other) for one, other in zip(found, expected, strict=True)
    )


# --- memory


@pytest.mark.parametrize(
    ("strategy", "most"),
    [("local", 20_140_000), ("propagated", 18_360_000), ("end_to_end", 40_980_000)],
)
def test_a_micro_batch_takes_no_more_memory_than_it_must(monkeypatch, strategy, most) -> None:
    """Bytes of 4 x 256 tokens through three layers of the embedded model, as counted when a layer
    kept its rows, its blocks and the dense weight of down_proj no longer than it needs them.
    Keeping all of them until the graph is gone took 4 to 20% more.
    """
    monkeypatch.setitem(trained.BLOCK, "cpu", 1 << 14)  # small next to a layer, as on a GPU
    model, _ = npt.load_base("tiny", quantization="nf4")
    form = NPTConfig(rank=16, layers="5,6,7", targets=("gate", "up", "down"))
    npt.attach(model, form, seed=0)
    ids = torch.randint(3, 1000, (4, 256), generator=torch.Generator().manual_seed(0))
    batch, config = batch_from_tensors(ids, torch.ones_like(ids)), TrainConfig(strategy=strategy)
    drive(model, batch, config)  # what is made once is made
    assert peak_bytes(partial(drive, model, batch, config), "cpu") < most
