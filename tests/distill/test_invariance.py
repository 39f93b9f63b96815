"""Loss and gradients do not depend on padding, the order and split of a batch, or packing.

Through the strategies as they are, on a 4-bit base. A token that is real does matter.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from students import moved
from torch import Tensor, nn

import npt
from npt.adapters.converted import adapter_parameters
from npt.batch import IGNORE_INDEX, Batch, Sample, collate
from npt.config import NPTConfig, TrainConfig
from npt.data.packing import pack
from npt.distill.strategies import STRATEGIES

PAD = 2

# fp32 sums of a few hundred terms, in products of other shapes and so in another order: some units
# of 2^-24 times the square root of their number, carried through four layers and back. Relative to
# the largest entry, because single entries may cancel.
ROUNDING = 3e-5

CONFIGS = {
    "local": TrainConfig(strategy="local", regularization_lambda=0.3),
    "end_to_end with logits": TrainConfig(
        strategy="end_to_end", regularization_lambda=0.3, logit_kl_weight=0.5
    ),
}
PROPERTY = settings(
    deadline=None,
    max_examples=5,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

Result = tuple[dict[str, Tensor], int]
"""Sums and gradients by name, and the tokens they are of."""


@st.composite
def documents(draw: st.DrawFn, at_least: int = 2) -> list[Sample]:
    """Texts, and prompts with their completions, of 2 to 12 tokens. Pad and end tokens are among
    them.
    """
    made = []
    for number in range(draw(st.integers(at_least, 6))):
        ids = tuple(draw(st.lists(st.integers(0, 127), min_size=2, max_size=12)))
        prompt = draw(st.integers(0, len(ids) - 1))
        labels = (*[IGNORE_INDEX] * prompt, *ids[prompt:]) if draw(st.booleans()) else None
        made.append(Sample(f"d{number}@0", ids, labels))
    return made


SIDES = st.sampled_from(["left", "right"])


@pytest.fixture(scope="module")
def student(load_model: Any) -> nn.Module:
    """Away from the start, where M = 0 and B is tiny and half of the maths would go untested."""
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return moved(model, 0.2)


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> TrainConfig:
    return CONFIGS[request.param]


def run(model: nn.Module, given: Sequence[Batch], config: TrainConfig) -> Result:
    """The sums of some micro-batches, their gradients added up as in a window."""
    parameters = adapter_parameters(model)
    for parameter in parameters.values():
        parameter.grad = None
    parts = [STRATEGIES[config.strategy](model, batch, config) for batch in given]
    sums = {
        name: torch.stack([getattr(part, name) for part in parts]).sum(dim=0)
        for name in ("loss", "nmse", "reg", "layer_nmse")
    }
    return {**sums, **{name: p.grad.clone() for name, p in parameters.items()}}, sum(
        part.tokens for part in parts
    )


def assert_same(one: Result, other: Result) -> None:
    assert one[1] == other[1]
    for name, value in one[0].items():
        expected = other[0][name]
        assert torch.isfinite(value).all(), name
        error, scale = float((value - expected).abs().max()), float(expected.abs().max())
        assert error <= ROUNDING * scale, f"{name}: off by {error} at scale {scale}"


@PROPERTY
@given(samples=documents(), side=SIDES, extra=st.integers(1, 9))
def test_padding_on_either_side_changes_nothing(student, config, samples, side, extra) -> None:
    plain = collate(samples, PAD)
    longer = collate(samples, PAD, side=side, length=plain.input_ids.shape[1] + extra)
    assert_same(run(student, [longer], config), run(student, [plain], config))


@PROPERTY
@given(samples=documents(), side=SIDES, filling=st.integers(0, 127), packing=st.booleans())
def test_what_stands_at_padding_changes_no_bit(
    student, config, samples, side, filling, packing
) -> None:
    rows = pack(samples, 16) if packing else samples
    one, other = (
        run(student, [collate(rows, pad, side=side, length=18)], config) for pad in (PAD, filling)
    )
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name


@PROPERTY
@given(samples=documents(), seed=st.integers(0, 99))
def test_the_order_of_a_batch_changes_nothing(student, config, samples, seed) -> None:
    shuffled = random.Random(seed).sample(samples, len(samples))
    assert_same(
        run(student, [collate(shuffled, PAD)], config),
        run(student, [collate(samples, PAD)], config),
    )


def parts(samples: list[Sample], size: int, side: str) -> list[Batch]:
    starts = range(0, len(samples), size)
    return [collate(samples[start : start + size], PAD, side=side) for start in starts]


@PROPERTY
@given(samples=documents(), size=st.integers(1, 3), side=SIDES)
def test_a_batch_may_be_split_and_its_parts_accumulated(
    student, config, samples, size, side
) -> None:
    split = parts(samples, size, side)
    assert_same(run(student, split, config), run(student, [collate(samples, PAD)], config))


@PROPERTY
@given(samples=documents(), max_length=st.integers(12, 40), side=SIDES, size=st.integers(1, 3))
def test_packing_changes_nothing_against_padding(
    student, config, samples, max_length, side, size
) -> None:
    rows = pack(samples, max_length)
    assert_same(
        run(student, parts(rows, size, side), config), run(student, [collate(samples, PAD)], config)
    )


@PROPERTY
@given(samples=documents(at_least=1), data=st.data(), packing=st.booleans())
def test_a_real_token_matters_wherever_it_stands(student, config, samples, data, packing) -> None:
    number = data.draw(st.integers(0, len(samples) - 1))
    place = data.draw(st.integers(0, len(samples[number].input_ids) - 1))
    ids = list(samples[number].input_ids)
    ids[place] = data.draw(st.integers(0, 127).filter(lambda token: token != ids[place]))
    changed = [
        *samples[:number],
        replace(samples[number], input_ids=tuple(ids)),
        *samples[number + 1 :],
    ]
    one, other = (
        run(student, [collate(pack(some, 24) if packing else some, PAD)], config)
        for some in (samples, changed)
    )
    for name in one[0]:
        assert not torch.equal(one[0][name], other[0][name]), name
