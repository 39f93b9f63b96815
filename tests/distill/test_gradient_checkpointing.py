"""Gradient checkpointing under end_to_end: less memory for the same bits, whatever is converted,
recorded or traced.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from resumed_runs import Runs, at, events, records, strict
from students import moved
from torch import Tensor, nn
from transformers import LlamaConfig

import npt
from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.batch import Batch, batch_from_tensors
from npt.config import NPTConfig, TrainConfig
from npt.distill.strategies import drive
from npt.doctor.measure import peak_bytes
from npt.errors import ConfigError
from npt.hooks import unfused
from random_base import random_base

FORMS = (
    NPTConfig(rank=4, layers="all", additive_scale=1.0),
    NPTConfig(rank=3, layers="1,3", targets=("gate",), modulation="additive"),
    NPTConfig(rank=3, layers="0,2", targets=("up", "down"), modulation="multiplicative"),
    NPTConfig(rank=4, layers="1-2", residual="keep"),
    NPTConfig(rank=8, layers="1-3", active=3, token_rank=4, additive_scale=1.0),
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"logit_kl_weight": 0.7, "regularization_lambda": 0.3},
    {"loss": "nmse_update", "logit_kl_weight": 0.5},
)


def student(load_model: Any, form: NPTConfig, **arguments: Any) -> Any:
    """The random Llama with its adapters moved away from the start (M of 0, a tiny B)."""
    model = load_model(**arguments)
    npt.attach(model, form)
    return moved(model, 0.2)


def both(**settings: Any) -> tuple[TrainConfig, TrainConfig]:
    config = TrainConfig(strategy="end_to_end", **settings)
    return config, replace(config, gradient_checkpointing=True)


def filled(model: Any, batch: Batch, config: TrainConfig, teacher: Any = None) -> dict[str, Tensor]:
    """Sums and gradients of one micro-batch."""
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    sums = drive(model, batch, config, teacher)
    found = {name: getattr(sums, name) for name in ("loss", "nmse", "reg", "logit", "layer_nmse")}
    return found | {name: p.grad.clone() for name, p in parameters.items()}


def assert_identical(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, other[name]), name


def calls_of(model: Any) -> list[int]:
    """Return counts of each layer's attention, kept up to date."""
    counts = [0] * len(decoder_layers(model))
    for index, layer in enumerate(decoder_layers(model)):

        def count(*_: Any, index: int = index) -> None:
            counts[index] += 1

        layer.self_attn.register_forward_hook(count)
    return counts


# --- the same bits


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda s: ",".join(map(str, s.values())) or "default"
)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.layers}-{f.residual}")
def test_losses_and_gradients_have_the_same_bits(load_model, batch, form, settings) -> None:
    model = student(load_model, form)
    plain, checkpointed = (filled(model, batch, config) for config in both(**settings))
    assert_identical(checkpointed, plain)


@pytest.mark.parametrize("way", ["dense", "bf16", "plain operations", "own teacher"])
def test_the_same_bits_in_every_way_of_computing_a_layer(load_model, batch, way) -> None:
    form = NPTConfig(rank=4, layers="1,2")
    model = student(load_model, form, quantization=None if way in ("dense", "bf16") else "nf4")
    if way == "bf16":
        model.to(torch.bfloat16)
        for parameter in adapter_parameters(model).values():
            parameter.data = parameter.data.float()
    teacher = load_model(quantization=None) if way == "own teacher" else None
    configs = both(logit_kl_weight=0.5, regularization_lambda=0.1)
    if way == "plain operations":
        with unfused():
            plain, checkpointed = (filled(model, batch, config, teacher) for config in configs)
    else:
        plain, checkpointed = (filled(model, batch, config, teacher) for config in configs)
    assert_identical(checkpointed, plain)


def test_only_layers_that_gradients_pass_are_computed_once_more(load_model, batch) -> None:
    model = student(load_model, NPTConfig(rank=4, layers="1,3"))
    counts = calls_of(model)
    plain, checkpointed = both()
    filled(model, batch, plain)
    assert counts == [1, 2, 2, 2]  # layer 0 once for teacher and student
    counts[:] = [0] * 4
    filled(model, batch, checkpointed)
    assert counts == [1, 3, 3, 3]


# --- memory


def test_a_further_layer_adds_its_states_and_nothing_else() -> None:
    """The layer's h and the teacher's output, instead of the tensors that its operations keep. A
    teacher's h is not asked for here.
    """
    rows, length, width = 2, 64, 64
    state = rows * length * width * 4
    peaks: dict[bool, list[int]] = {False: [], True: []}
    shape = {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    ids = torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = batch_from_tensors(ids, torch.ones_like(ids))
    for count in (2, 3):
        model = random_base(
            LlamaConfig(num_hidden_layers=count, **shape), quantization="nf4", device="cpu"
        )
        npt.attach(model, NPTConfig(rank=4, layers="all"))
        for kind, config in zip((False, True), both(), strict=True):
            peaks[kind].append(peak_bytes(partial(drive, model, batch, config), "cpu"))
    per_layer = {kind: more - less for kind, (less, more) in peaks.items()}
    # Beside the states there are that of the random numbers and a few scalars. The adapters'
    # gradients come after the peak.
    assert 0 <= per_layer[True] - 2 * state - torch.get_rng_state().nbytes < 256
    assert per_layer[False] > 15 * state


# --- who looks on


class Broken(nn.Module):
    """SiLU whose gradient is not a number at one place."""

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.silu(x)
        hole = torch.zeros_like(out)
        hole[..., 0, 0] = 1.0
        # sqrt at 0: 0 forward, infinite backward, and 0 * inf
        return out + (x.detach() * 0 + x * 0).sqrt() * hole


def test_a_trace_names_the_same_operation(load_model, batch) -> None:
    model = student(load_model, NPTConfig(rank=4, layers="1,3"))
    model.model.layers[2].mlp.act_fn = Broken()
    verdicts = []
    for config in both(logit_kl_weight=0.5):
        verdicts.append(
            npt.trace(model, batch, run=lambda config=config: drive(model, batch, config))
        )
    plain, checkpointed = verdicts
    assert plain is not None and plain.layer == 2 and plain.phase == "backward"
    for name in ("operation", "module", "source", "phase", "cause", "layer", "index"):
        assert getattr(checkpointed, name) == getattr(plain, name), name


# --- settings


@pytest.mark.parametrize("strategy", ["local", "propagated"])
def test_where_one_graph_is_kept_at_a_time_it_is_refused_in_one_line(strategy) -> None:
    with pytest.raises(
        ConfigError, match=r"--gradient_checkpointing .*--strategy end_to_end"
    ) as caught:
        TrainConfig(gradient_checkpointing=True, strategy=strategy)
    assert "\n" not in str(caught.value)


def test_a_run_resumed_with_it_says_so_and_ends_as_one_without(load_model, tmp_path) -> None:
    settings = {"strategy": "end_to_end", "logit_kl_weight": 0.5, "scheduler_type": "constant"}
    runs = Runs(load_model(), tmp_path, data=lambda: records(6), settings=settings)
    runs.run("whole")
    runs.run("stopped", at(3))
    runs.run("stopped", resume="auto", gradient_checkpointing=True)
    runs.outcome("stopped").assert_equal(runs.outcome("whole"))
    assert "changed setting: gradient_checkpointing was False, is now True" in runs.said.getvalue()
    assert events(tmp_path / "stopped", "resume")[0]["changed"] == {
        "gradient_checkpointing": [False, True]
    }
    assert strict(tmp_path / "stopped" / "run.json")["settings"]["gradient_checkpointing"] is True
