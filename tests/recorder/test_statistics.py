"""The statistics of a tensor: equal to a slow fp64 reference, whatever is in it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from npt.recorder import statistics
from npt.recorder.statistics import FIELDS, share_beyond, summarise

NAN, INF = math.nan, math.inf


def reference(values: Tensor) -> dict[str, float]:
    """The definition, element by element, in numpy's longest floating-point numbers."""
    x = np.asarray(values.double().tolist(), dtype=np.longdouble).reshape(-1)
    finite = x[np.isfinite(x)]
    found = {
        "count": x.size,
        "nan": np.isnan(x).sum(),
        "pos_inf": (x == INF).sum(),
        "neg_inf": (x == -INF).sum(),
    }
    sizes = dict.fromkeys(FIELDS[4:], NAN)
    if finite.size:
        mean = finite.mean()
        sizes = {
            "min": finite.min(),
            "max": finite.max(),
            "mean": mean,
            "std": np.sqrt(((finite - mean) ** 2).mean()),
            "rms": np.sqrt((finite**2).mean()),
        }
    return {name: float(value) for name, value in {**found, **sizes}.items()}


def assert_matches(found: Tensor, values: Tensor) -> None:
    assert found.shape == (len(FIELDS),) and found.dtype == torch.float64
    numbers, expected = dict(zip(FIELDS, found.tolist(), strict=True)), reference(values)
    for name in FIELDS[:4]:
        assert numbers[name] == expected[name], name
    size = max(abs(expected["min"]), abs(expected["max"]))
    for name in FIELDS[4:]:
        if math.isnan(expected[name]):
            assert math.isnan(numbers[name]), name
        elif name in ("min", "max"):
            assert numbers[name] == expected[name], name
        else:
            # Sums run in fp32 for fp32 and below: its rounding is relative to the largest element.
            assert math.isclose(numbers[name], expected[name], rel_tol=1e-5, abs_tol=2e-6 * size), (
                name
            )


def selected(values: Tensor, valid: Tensor | None = None) -> Tensor:
    """The way that a GPU takes, taken here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(statistics, "_readable", lambda values: False)
        return summarise(values, valid)


BOTH = pytest.mark.parametrize("take", [summarise, selected], ids=["read", "selected"])
ELEMENTS = st.one_of(
    st.floats(width=32),
    st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1e30, -1e30, 3e38, 1e-30, 1e-45, 1.0, 1 + 1e-6]),
)


@settings(max_examples=80, deadline=None)
@given(
    elements=st.lists(ELEMENTS, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    scale=st.sampled_from([1.0, 1e-20, 1e20]),
)
def test_the_statistics_are_those_of_a_slow_reference(elements, dtype, scale) -> None:
    values = (torch.tensor(elements, dtype=torch.float64) * scale).to(dtype)
    assert_matches(summarise(values), values)
    assert_matches(selected(values), values)


@settings(max_examples=50, deadline=None)
@given(
    elements=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bool]),
)
def test_integers_and_booleans_have_statistics_too(elements, dtype) -> None:
    values = torch.tensor(elements, dtype=torch.int64).to(dtype)
    assert_matches(summarise(values), values)
    assert_matches(selected(values), values)


@BOTH
@pytest.mark.parametrize(
    "values",
    [
        torch.tensor(2.5),
        torch.tensor(NAN),
        torch.empty(0),
        torch.empty(0, 7),
        torch.empty(3, 0, dtype=torch.float16),
        torch.full((3, 2), INF),
        torch.tensor([NAN, INF, -INF]),
        torch.full((1000,), 65504.0, dtype=torch.float16),
        torch.tensor([3e38, -3e38]),
        torch.tensor([1e308, -1e308, 1e-308], dtype=torch.float64),
        torch.tensor([5e-324], dtype=torch.float64),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0)[::5],
        torch.ones(4, 1).expand(4, 100),
        torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    ],
    ids=lambda v: f"{v.dtype}-{list(v.shape)}",
)
def test_odd_tensors_have_statistics(take, values) -> None:
    assert_matches(take(values), values)


@BOTH
def test_many_elements_far_from_zero_keep_their_spread(take) -> None:
    # in one fp32 pass the squares' difference would be all rounding here
    values = 1000.0 + torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    found = dict(zip(FIELDS, take(values).tolist(), strict=True))
    exact = values.double()
    # an fp32 element near 1000 is rounded by 3e-5
    assert math.isclose(found["std"], float(exact.std(correction=0)), rel_tol=1e-4)
    assert math.isclose(found["mean"], float(exact.mean()), rel_tol=1e-6)
    # a sum over so many elements in fp32 is rounded
    assert math.isclose(found["rms"], float(exact.square().mean().sqrt()), rel_tol=2e-4)


def test_complex_numbers_count_as_their_parts() -> None:
    values = torch.tensor([1 + 2j, complex(NAN, 3)])
    assert_matches(summarise(values), torch.tensor([1.0, 2.0, NAN, 3.0]))
    assert_matches(summarise(values.conj()), torch.tensor([1.0, -2.0, NAN, -3.0]))


@settings(max_examples=50, deadline=None)
@given(
    batch=st.integers(1, 3),
    time=st.integers(1, 4),
    rest=st.sampled_from([(), (3,), (2, 2), (0,)]),
    data=st.data(),
)
def test_positions_that_do_not_count_are_left_out(batch, time, rest, data) -> None:
    valid = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=batch * time, max_size=batch * time))
    ).reshape(batch, time)
    values = torch.full((batch, time, *rest), NAN)
    values[valid] = torch.randn(values[valid].shape, generator=torch.Generator().manual_seed(batch))
    assert_matches(summarise(values, valid), values[valid])
    assert_matches(selected(values, valid), values[valid])


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 4, 3), (4, 2, 3), ()])
def test_a_tensor_of_another_shape_is_taken_whole(shape) -> None:
    values = torch.ones(shape)
    assert_matches(summarise(values, torch.zeros(2, 3, dtype=torch.bool)), values)


def test_the_share_beyond_a_distance_counts_valid_positions_only() -> None:
    values = torch.tensor([[0.5, 1.49], [1.0, 9.0]])
    assert share_beyond(values, 1.0, 0.48).tolist() == [0.75]
    assert share_beyond(
        values, 1.0, 0.48, torch.tensor([[True, True], [True, False]])
    ).tolist() == [2 / 3]
    assert share_beyond(torch.empty(0), 1.0, 0.5).tolist() == [0.0]
    assert share_beyond(torch.tensor([NAN, 3.0]), 1.0, 0.5).tolist() == [0.5]
