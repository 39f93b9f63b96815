"""What a model is left as: modes, adapters and updates come back exactly, however contexts nest or
end.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_students import IDS, student
from updates import random_update

import npt
from npt.adapters.attach import set_adapters
from npt.adapters.consolidate import apply_update, consolidated, patched_module
from npt.adapters.converted import adapter_parameters, attached_config, is_attached, npt_layers
from npt.base.patched import Patched
from npt.batch import batch_from_tensors
from npt.config import NPTConfig, TrainConfig
from npt.distill.strategies import STRATEGIES
from npt.errors import ModelError

LoadModel = Callable[..., Any]
BATCH = batch_from_tensors(torch.tensor([IDS]), torch.ones(1, len(IDS), dtype=torch.int64))


def state(model: Any) -> dict[str, Any]:
    """All that contexts and refused calls may not leave otherwise than they found it."""
    return {
        "attached": is_attached(model),
        "modes": {index: layer.npt.mode for index, layer in npt_layers(model)},
        "trainable": [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ],
        "updates": len(consolidated(model)),
        "patched": [isinstance(patched_module(each), Patched) for each in model.model.layers],
        "attributes": sorted(vars(model)),
    }


def with_other_ranks(model: Any) -> None:
    """Do the last thing that a calibration with a budget of ranks does."""
    config = attached_config(model)
    count = len(npt_layers(model))
    other = NPTConfig(
        **{
            **vars(config),
            "ranks": tuple(config.ranks_of(count)[0] + 1 + number for number in range(count)),
        }
    )
    shapes = npt.adapters.attach.adapter_shapes(model, other)
    set_adapters(model, other, {name: torch.zeros(shape) for name, shape in shapes.items()})


@pytest.fixture
def refused(load_model: LoadModel, tmp_path: Path) -> Path:
    """An adapter of another configuration than the model's."""
    return npt.save_adapter(student(load_model, rank=3), tmp_path / "refused")


def test_adapters_resized_inside_a_context_leave_it_as_students(load_model) -> None:
    model = student(load_model)
    adapters = [layer.npt for _, layer in npt_layers(model)]
    adapters[0].A.requires_grad_(False)
    before = state(model)
    with npt.adapters_disabled(model):
        with_other_ranks(model)
        assert set(state(model)["modes"].values()) == {"teacher"}
    assert state(model) == before
    # the same modules, so that whoever holds them sees the new numbers
    assert [layer.npt for _, layer in npt_layers(model)] == adapters
    assert all(layer.npt.config.rank == len(layer.npt.A) for _, layer in npt_layers(model))


@pytest.mark.parametrize("attached_by", ["model", "view"])
@pytest.mark.parametrize("detached_by", ["model", "view"])
def test_a_view_is_its_model_where_adapters_come_and_go(
    load_model, attached_by, detached_by
) -> None:
    plain = state(load_model())
    model = student(load_model)
    view = npt.student_view(model)
    npt.detach(view if detached_by == "view" else model)
    assert state(model) == plain and not is_attached(view)
    npt.attach(view if attached_by == "view" else model, npt.NPTConfig(layers="1", rank=2))
    assert (
        is_attached(model)
        and is_attached(view)
        and [index for index, _ in npt_layers(model)] == [1]
    )
    with pytest.raises(ModelError, match="already"):
        npt.attach(view)
    npt.detach(model)
    assert state(model) == plain


def test_a_layer_without_memory_for_its_adapter_leaves_none_converted(
    load_model, monkeypatch
) -> None:
    model = load_model()
    before, moved = state(model), []

    def to(self: Any, *arguments: Any) -> Any:
        moved.append(self)
        if len(moved) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return self

    monkeypatch.setattr(npt.adapters.attach.NPTAdapter, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        npt.attach(model, npt.NPTConfig(layers="all", rank=2))
    assert state(model) == before


class TestWithoutGradients:
    """Under `torch.inference_mode` tensors are made that no gradient can use; nothing that lasts
    may be one.
    """

    @pytest.mark.parametrize(
        ("strategy", "off"),
        [
            ("local", torch.inference_mode),
            ("propagated", torch.no_grad),
            ("end_to_end", torch.inference_mode),
        ],
    )
    def test_what_is_made_there_trains(
        self, load_model, llama_folder, tmp_path, strategy, off
    ) -> None:
        folder = npt.save_adapter(student(load_model), tmp_path / "adapter")
        for make in (
            lambda model: npt.attach(model, npt.NPTConfig(rank=2)),
            lambda model: npt.load_adapter(model, folder),
            lambda model: npt.attach(model, npt.NPTConfig(rank=2)) and with_other_ranks(model),
            lambda model: (
                npt.attach(model, npt.NPTConfig(rank=2))
                and apply_update(model, random_update(model))
            ),
        ):
            with off():
                model = npt.load_base(str(llama_folder), quantization="nf4")[0]
                make(model)
            assert not any(
                tensor.is_inference() for tensor in [*model.parameters(), *model.buffers()]
            )
            STRATEGIES[strategy](model, BATCH, TrainConfig())
            assert all(
                parameter.grad is not None for parameter in adapter_parameters(model).values()
            )


# --- contexts

CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "disabled": lambda base: npt.adapters_disabled(base),
    "student": lambda base: npt.adapter_mode(base, "student"),
    "floor": lambda base: npt.adapter_mode(npt.student_view(base), "floor"),
}


def detach(base: Any, folder: Path) -> None:
    npt.detach(npt.teacher_view(base))


def attach_again(base: Any, folder: Path) -> None:
    npt.detach(base)
    npt.attach(base, npt.NPTConfig(layers="0,2", rank=2))


def fail(base: Any, folder: Path) -> None:
    raise ValueError("inside")


ACTIONS: dict[str, Callable[[Any, Path], None]] = {
    "nothing": lambda base, folder: None,
    "fail": fail,
    "refused load": npt.load_adapter,
    "refused attach": lambda base, folder: npt.attach(base),
    "other ranks": lambda base, folder: with_other_ranks(base),
    "view": lambda base, folder: npt.student_view(base)(torch.tensor([IDS])),
}


@pytest.fixture
def base(load_model: LoadModel) -> Any:
    """A student with an update."""
    model = student(load_model)
    apply_update(model, random_update(model))
    return model


SHARED = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
"""All examples share one model, so each must leave it as it found it."""


def innermost(names: list[str]) -> set[str]:
    """The mode that the innermost of open contexts asks for."""
    return {{"disabled": "teacher"}.get(names[-1], names[-1]) if names else "student"}


@SHARED
@given(
    names=st.lists(st.sampled_from(sorted(CONTEXTS)), max_size=6),
    action=st.sampled_from(sorted(ACTIONS)),
)
def test_nested_contexts_come_back_exactly_whatever_happens_inside(
    base, refused, names, action
) -> None:
    def run(left: list[str]) -> None:
        assert set(state(base)["modes"].values()) == innermost(names[: len(names) - len(left)])
        before = state(base)
        try:
            if not left:
                ACTIONS[action](base, refused)
            else:
                with CONTEXTS[left[0]](base):
                    run(left[1:])
        finally:
            assert state(base) == before

    with contextlib.suppress(npt.NPTError, ValueError):
        run(names)
    assert state(base)["modes"] and set(state(base)["modes"].values()) == {"student"}


@pytest.mark.parametrize("names", [["disabled"], ["floor", "disabled"]], ids=str)
@pytest.mark.parametrize("action", [detach, attach_again])
def test_adapters_that_are_detached_inside_contexts_stay_so(base, names, action) -> None:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(CONTEXTS[name](base))
        action(base, Path())
        expected = {
            key: value
            for key, value in state(base).items()
            if key in ("attached", "modes", "trainable", "updates")
        }
    found = state(base)
    assert {key: found[key] for key in expected} == expected and any(found["patched"])
    assert set(found["modes"].values()) <= {"student"}
