"""Notes by memory: every view finds them, overwriting ends them, and memory that is used again has
none.
"""

from __future__ import annotations

import gc

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from npt.diagnostics.tracer.memory import Memory, stretch_of


def test_every_view_of_a_tensor_finds_its_note() -> None:
    memory: Memory[str] = Memory()
    x = torch.zeros(3, 4)
    memory.add(x, "a")
    for view in (x, x.t(), x[1], x[:, 2], x.view(-1), x.detach(), x[None], x[2, 3]):
        assert memory.of(view) == ["a"]
    assert memory.of(torch.zeros(3, 4)) == [] and memory.of(x.clone()) == []


def test_a_note_on_a_part_is_not_one_on_another_part() -> None:
    memory: Memory[str] = Memory()
    x = torch.zeros(3, 4)
    memory.add(x[1], "a")
    assert memory.of(x) == memory.of(x[1, 3]) == ["a"]
    assert memory.of(x[0]) == memory.of(x[2]) == []


def test_parts_of_one_memory_have_their_own_notes_the_oldest_first() -> None:
    memory: Memory[str] = Memory()
    x = torch.zeros(3, 4)
    memory.add(x[2], "a")
    memory.add(x[0], "b")
    memory.add(x[0], "b")
    assert memory.of(x) == ["a", "b"] and memory.of(x[0]) == ["b"]


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


def test_a_note_does_not_keep_memory() -> None:
    memory: Memory[str] = Memory()
    x = torch.zeros(10)
    memory.add(x, "a")
    ((storage, _, _),) = next(iter(memory._notes.values()))
    del x
    assert storage.expired()


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


def test_an_expanded_tensor_is_where_its_one_element_is() -> None:
    x = torch.zeros(4)
    assert stretch_of(x[1].expand(5, 5)) is not None
    memory: Memory[str] = Memory()
    memory.add(x[1].expand(5, 5), "a")
    assert memory.of(x[1]) == ["a"] and memory.of(x[2]) == []


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
