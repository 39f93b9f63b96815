"""Badness and memory: numbers of every dtype and layout are judged in one pass; a note on memory is
found by every view, ends when it is overwritten, and does not outlive it.
"""

import gc
import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from npt.tracer.tensors import (
    Badness,
    Memory,
    absmax,
    count,
    element,
    first_bad,
    judge,
    looks_like_a_mask,
    numbers,
    tensors_in,
)

NAN, INF = math.nan, math.inf
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_infinity_are_bad_and_minus_infinity_may_be_a_mask(dtype) -> None:
    assert (
        judge(torch.tensor([1.0, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype))
        == Badness.FINE
    )
    assert judge(torch.tensor([1.0, -INF], dtype=dtype)) == Badness.SOFT
    for value in (NAN, INF):
        assert judge(torch.tensor([1.0, -INF, value], dtype=dtype)) == Badness.HARD


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_are_judged(dtype) -> None:
    assert judge(torch.ones(3).to(dtype)) == Badness.FINE
    bad = torch.tensor([1.0, NAN, 2.0]).to(dtype)
    assert (
        judge(bad) == Badness.HARD
        and first_bad(bad) == (1,)
        and absmax(bad) == 2.0
        and count(bad) == (1, 0)
    )


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_holds_no_numbers_is_fine() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    nothing = [
        torch.ones(0),
        torch.tensor([1, 2]),
        torch.tensor([True]),
        torch.ones(3, device="meta"),
        fake,
        torch._efficientzerotensor((3,)),
        torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0), (3,)),
    ]
    for tensor in nothing:
        assert judge(tensor) == Badness.FINE and first_bad(tensor) == () and count(tensor) == (0, 0)


def test_complex_numbers_are_judged_by_their_parts_conjugated_or_not() -> None:
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, NAN]))
    for value in (z, z.conj(), z.conj().imag):
        assert judge(value) == Badness.HARD and first_bad(value) == (1,)
    assert judge(z[:1]) == Badness.FINE
    assert element(z, (0,)) == 3.0 and absmax(z) == 3.0 and count(z) == (1, 0)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_is_judged_by_values_and_indexed_as_if_dense() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[4, 1]]), torch.tensor([[1.0, 2.0], [3.0, INF]]), (6, 2)
    )
    assert judge(sparse) == Badness.HARD and first_bad(sparse) == (1, 1) and absmax(sparse) == 3.0
    assert numbers(sparse).data_ptr() == sparse._values().data_ptr()


def test_a_limit_counts_larger_numbers_and_below_it_possible_masks() -> None:
    x = torch.tensor([1.0, 50.0, -200.0])
    assert judge(x) == judge(x, 200.0) == Badness.FINE
    assert (
        judge(x, 100.0) == Badness.SOFT
        and first_bad(x, 100.0) == (2,)
        and first_bad(x, 100.0, soft=False) == ()
    )
    assert judge(x, 10.0) == Badness.HARD and first_bad(x, 10.0) == (1,)


def test_what_only_looks_like_a_wrapping_tensor_is_not_searched() -> None:
    class Loose:
        def __getattr__(self, name: str) -> None:
            return None

    wrapping = type("Wrapping", (torch.Tensor,), {"__tensor_flatten__": lambda self: ([], None)})
    kept = torch.ones(1)
    assert [*tensors_in({"object": Loose(), "class": wrapping, "x": kept})] == [("x", kept)]


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    planted=st.dictionaries(
        st.integers(0, 63), st.sampled_from([NAN, INF, -INF, 7.0, -7.0]), max_size=4
    ),
    limit=st.sampled_from([INF, 5.0]),
    soft=st.booleans(),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_the_first_bad_element_is_the_first_in_the_order_of_reading(
    shape, planted, limit, soft
) -> None:
    x = torch.zeros(shape)
    for place, value in planted.items():
        x.view(-1)[place % x.numel()] = value

    def bad(value: float) -> bool:
        high = math.isnan(value) or value == INF or value > limit
        return high or (soft and (value == -INF or value < -limit))

    expected = next((i for i in itertools.product(*map(range, shape)) if bad(float(x[i]))), ())
    assert first_bad(x, limit, soft) == expected


def test_the_end_of_a_dtype_is_a_mask_and_another_number_only_with_nothing_beside_it() -> None:
    for end in (-INF, torch.finfo(torch.bfloat16).min, -65504.0, -65504.0 / 2):
        assert looks_like_a_mask(torch.tensor([0.3, end, -2.0]))
    assert looks_like_a_mask(torch.tensor([0.0, -1e9, -1e9, 0.0]))
    assert not looks_like_a_mask(torch.tensor([0.3, -1e9]))
    assert not looks_like_a_mask(torch.tensor([1]))


# --- memory


def test_every_view_of_a_tensor_finds_its_note() -> None:
    memory: Memory[str] = Memory()
    x = torch.zeros(3, 4)
    memory.add(x, "a")
    for view in (x, x.t(), x[1], x[:, 2], x.view(-1), x.detach(), x[None], x[2, 3]):
        assert memory.of(view) == ["a"]
    assert memory.of(torch.zeros(3, 4)) == [] and memory.of(x.clone()) == []


def test_overwriting_ends_a_note_and_overwriting_a_part_does_not() -> None:
    memory: Memory[str] = Memory()
    x = torch.zeros(3, 4)
    memory.add(x, "a")
    memory.forget(x[1])
    assert memory.of(x) == ["a"]
    memory.forget(x.view(-1))
    assert memory.of(x) == []
    memory.add(x[:, 2], "column")
    memory.forget(x[:, 1])
    assert memory.of(x) == ["column"]
    memory.forget(x[:, 2])
    assert memory.of(x) == []


def test_memory_that_is_freed_and_used_again_has_no_note() -> None:
    memory: Memory[str] = Memory()
    for _ in range(200):
        x = torch.zeros(1000)
        assert memory.of(x) == []
        memory.add(x, "a")
        del x
        gc.collect(0)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_memory_take_no_notes() -> None:
    memory: Memory[str] = Memory()
    for tensor in (torch.zeros(0), torch.eye(2).to_sparse_csr()):
        memory.add(tensor, "a")
        memory.forget(tensor)
        assert memory.of(tensor) == []
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,))
    memory.add(sparse, "a")
    assert memory.of(sparse._values()) == ["a"]


SLICE = st.tuples(st.integers(0, 7), st.integers(1, 4)).map(
    lambda pair: slice(pair[0], min(8, pair[0] + pair[1]))
)


@given(steps=st.lists(st.tuples(st.booleans(), SLICE), max_size=12))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_notes_on_slices_are_what_a_list_of_intervals_says(steps) -> None:
    memory: Memory[int] = Memory()
    buffer, reference = torch.zeros(8), []
    for number, (add, part) in enumerate(steps):
        if add:
            memory.add(buffer[part], number)
            reference.append((part, number))
        else:
            memory.forget(buffer[part])
            reference = [
                (p, n) for p, n in reference if not (part.start <= p.start and p.stop <= part.stop)
            ]
    for i in range(8):
        assert memory.of(buffer[i]) == [n for p, n in reference if p.start <= i < p.stop]
