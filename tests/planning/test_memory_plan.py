"""The arithmetic of memory: terms, what they add up to, and how sizes are written."""

from __future__ import annotations

import pytest
import torch

import npt
from npt.adapters.converted import adapter_parameters
from npt.config import NPTConfig
from npt.errors import ConfigError
from npt.planning.memory import MemoryPlan, Term, available, shown, state_terms
from npt.planning.shape import SHAPES, Shape, llama_config, parse_shape


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB"),
        (2**20, "1.00 MiB"),
        (6.2 * 2**30, "6.20 GiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit_that_they_fill(size, text) -> None:
    assert shown(size) == text


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"targets": "gate"},
        {"targets": "up,down", "modulation": "additive"},
        {"modulation": "multiplicative", "layers": "0,2-3"},
        {"layers": "all", "ranks": (1, 2, 3, 4)},
    ],
    ids=str,
)
def test_trainable_numbers_are_those_that_attach_makes(load_model, settings) -> None:
    model = load_model(None)
    config = NPTConfig(**{"rank": 3, **settings})
    npt.attach(model, config)
    assert Shape.of(model.config).adapter_numbers(config) == sum(
        p.numel() for p in adapter_parameters(model).values()
    )


def test_a_plan_adds_up_by_phase_and_names_what_takes_most() -> None:
    plan = MemoryPlan(
        (
            Term("base", 10),
            Term("graph", 30, ("micro-batch",)),
            Term("logits", 35, ("evaluation",)),
            Term("other", 1),
        ),
        2,
        1,
    )
    assert [plan.of(phase) for phase in ("micro-batch", "step", "evaluation")] == [41, 11, 46]
    assert (plan.peak, plan.phase, plan.largest.name) == (46, "evaluation", "logits")
    assert plan.as_dict()["phases"] == {"micro-batch": 41, "step": 11, "evaluation": 46}


def test_late_results_keep_a_state_for_each_step_in_flight() -> None:
    assert [
        sum(term.bytes for term in state_terms(1000, in_flight=steps)) for steps in (0, 1, 3)
    ] == [4000 * 8, 4000 * 11, 4000 * 17]


def test_the_host_says_what_is_free() -> None:
    free = available(torch.device("cpu"))
    assert free is None or free > 2**20


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_makes_a_model_of_that_shape(name) -> None:
    assert Shape.of(llama_config(parse_shape(name), 4096)) == SHAPES[name]
    assert llama_config(SHAPES[name], 4096).max_position_embeddings == 4096


def test_a_shape_may_be_given_in_numbers() -> None:
    assert parse_shape("256,512,8,4,2,1000") == Shape(8, 256, 512, 4, 2, 64, 1000)


@pytest.mark.parametrize(
    "text",
    [
        "llama",
        "1,2,3",
        "256,512,8,4,2,x",
        "256,512,8,0,2,1000",
        "100,512,8,8,2,1000",
        "256,512,8,4,3,1000",
        f"256,512,{10**30},4,2,1000",
    ],
)
def test_a_shape_that_cannot_be_is_refused_in_one_line(text) -> None:
    with pytest.raises(ConfigError, match="--shape is") as caught:
        parse_shape(text)
    assert "\n" not in str(caught.value)
