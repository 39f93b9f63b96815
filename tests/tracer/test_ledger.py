"""The ledger: a bad tensor leads back to the operation that made it bad, whatever happened to it on
the way.
"""

import ctypes
import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from npt.tracer.ledger import Ledger
from npt.tracer.operations import External, Origin

NAN, INF = math.nan, math.inf
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def origin(
    function: Callable[[Tensor], Tensor],
    x: Tensor = X,
    limit: float = INF,
    externals: tuple[External, ...] = (),
) -> Origin | None:
    """Of what `function` gives."""
    with Ledger({}, externals, limit) as ledger:
        result = function(x.clone())
        return ledger.origin_of(result)


def named(function: Callable[[Tensor], Tensor], **arguments) -> str | None:
    found = origin(function, **arguments)
    return None if found is None else found.operation


def zero(x: Tensor) -> Tensor:
    return x - x


# --- passing on is no fault


CARRIERS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda x: (x + 1) * 2,
    "product": lambda x: x @ torch.ones(3, 3),
    "views": lambda x: x.t()[1:].reshape(-1).unsqueeze(0),
    "copy": lambda x: torch.cat([x.clone(), x.contiguous()]),
    "in place": lambda x: x.add_(1).mul_(2),
    "cast": lambda x: x.double().to(torch.bfloat16).float(),
    "sum": lambda x: x.sum(),
    "indexing": lambda x: x[torch.tensor([0, 1])],
    "into a buffer": lambda x: torch.zeros(4, 3).index_copy_(0, torch.tensor([1, 3]), x),
    "into fresh memory": lambda x: torch.empty(2, 3).copy_(x),
    "out": lambda x: torch.mul(x, 2, out=torch.empty(2, 3)),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x).conj() * 2),
    "fft": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=3),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "softmax": lambda x: torch.softmax(x, -1),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_passes_a_bad_number_on_is_not_its_origin(carrier) -> None:
    assert named(lambda x: CARRIERS[carrier](zero(x) / zero(x))) == "div"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_good_numbers_have_no_origin(carrier) -> None:
    assert origin(CARRIERS[carrier]) is None


HIDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda x: torch.where(torch.isfinite(x), x, 0.0),
    "nan_to_num": lambda x: x.nan_to_num(0.0),
    "masked_fill": lambda x: x.masked_fill(~torch.isfinite(x), 1.0),
    "selection": lambda x: torch.cat([x[torch.isfinite(x)], X[0]]),
    "overwriting": lambda x: x.fill_(2.0),
    "overwriting with a copy": lambda x: x.copy_(X),
    "overwriting with a result": lambda x: torch.mul(X, 2, out=x),
    "zeroing": lambda x: x.zero_(),
    "random numbers": lambda x: x.uniform_(1, 2),
    "assignment": lambda x: x.index_put_(
        (~torch.isfinite(x)).nonzero(as_tuple=True), torch.tensor(1.0)
    ),
}


@pytest.mark.parametrize("hider", HIDERS)
def test_a_number_that_was_hidden_is_not_the_origin_of_a_later_one(hider) -> None:
    found = origin(lambda x: zero(HIDERS[hider](zero(x) / zero(x))).add_(-1).sqrt())
    assert found is not None and found.operation == "sqrt"


def test_a_row_of_a_buffer_does_not_answer_for_another() -> None:
    def function(x: Tensor) -> Tensor:
        buffer = torch.zeros(3, 3)
        buffer[0] = zero(x)[0] / zero(x)[0]
        buffer[2] = (-x[0]).sqrt()
        return buffer[2]

    assert named(function) == "sqrt"


def test_of_two_reasons_the_one_that_is_left_is_named() -> None:
    def function(x: Tensor) -> Tensor:
        both = torch.cat([zero(x) / zero(x), zero(x).log()])
        return torch.where(torch.isnan(both), 0.0, both).sum()

    assert named(function) == "log"


# --- what masks are made of


CAUSAL = torch.full((3, 3), -INF).triu(1)


def test_a_mask_made_by_arithmetic_comes_after_certain_faults() -> None:
    assert named(lambda x: (x > 2).float().log() + zero(x) / zero(x)) == "div"
    assert named(lambda x: torch.softmax((x > 9).float().log(), -1)) == "log"


def test_minus_infinity_out_of_good_numbers_is_a_fault() -> None:
    assert named(lambda x: zero(x).log()) == "log"
    assert named(lambda x: -(x / zero(x))) == "div"


def test_a_constant_is_blamed_on_who_uses_it() -> None:
    for constant in (
        lambda: NAN,
        lambda: torch.tensor(NAN),
        lambda: torch.full((), INF),
        lambda: torch.scalar_tensor(NAN),
    ):
        assert named(lambda x, constant=constant: x * constant()) == "mul"
    assert named(lambda x: torch.where(x > 2, x, NAN)) == "where"
    assert named(lambda x: x * torch.tensor([1.0, NAN, 1.0])) == "lift_fresh"


# --- what was there before the pass


def test_a_bad_tensor_from_outside_is_named_and_its_own_index_shown() -> None:
    weight = torch.ones(3, 3)
    weight[1, 2] = NAN
    for tensor, kind, trained in ((weight, "state", True), (weight, "data", False)):
        found = origin(
            lambda x: x @ weight, externals=(External("m.weight", kind, tensor, trained),)
        )
        assert found is not None and found.external is not None
        assert (found.external.name, found.index, found.operation) == ("m.weight", (1, 2), "mm")
        assert found.through == ((2, 3), (0, 2))


def test_minus_infinity_is_a_mask_in_a_buffer_and_a_fault_in_a_weight() -> None:
    with Ledger({}, (External("mask", "state", CAUSAL),)) as ledger:
        assert ledger.origin_of(X[:1] + CAUSAL).meant
    found = origin(
        lambda x: x[:1] + CAUSAL, externals=(External("weight", "state", CAUSAL, no_mask=True),)
    )
    assert found is not None and found.external is not None and found.external.name == "weight"


def test_a_number_that_no_operation_made_is_from_outside() -> None:
    def extension(x: Tensor) -> Tensor:
        memory = torch.empty(2, 3)
        numbers = (ctypes.c_float * 6).from_address(memory.data_ptr())
        numbers[:] = [1.0, 2.0, 3.0, NAN, 5.0, 6.0]
        return x * memory

    found = origin(extension)
    assert found is not None and found.external is not None
    assert (found.external.kind, found.index) == ("outside", (1, 0))


def test_what_stands_in_fresh_memory_is_nobodys_number() -> None:
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        filled = lambda x: torch.empty(2, 3).index_copy_(0, torch.tensor([1]), x[:1])  # noqa: E731
        assert origin(lambda x: filled(x)[1] * 2) is None
        assert named(lambda x: filled(zero(x).log())[1] * 2) == "log"
        assert named(lambda x: torch.empty(2, 3).uniform_(1, 2).neg().sqrt()) == "sqrt"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_made_of_tensors_is_taken_apart() -> None:
    with Ledger({}, ()) as ledger:
        nested = torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)
        bad = (nested - nested).log()
        found = ledger.origin_of(bad._values)
    assert found is not None and found.operation == "log"


# --- any program

KEEPS_SHAPE = [
    name
    for name in CARRIERS
    if CARRIERS[name](X.clone()).shape == X.shape and CARRIERS[name](X.clone()).dtype == X.dtype
]
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda x: zero(x).log(),
    "sqrt": lambda x: (-x.abs() - 1).sqrt(),
    "div": lambda x: (x.abs() + 1) / zero(x),
    "exp": lambda x: (x.abs() * 0 + 1000).exp(),
    "masked_fill": lambda x: x.masked_fill(x == x, NAN),
}
STEP = st.one_of(
    st.sampled_from(KEEPS_SHAPE).map(lambda name: ("carry", name)),
    st.sampled_from(sorted(FAULTS)).map(lambda name: ("hidden", name)),
)


@given(
    before=st.lists(STEP, max_size=5),
    fault=st.sampled_from(sorted(FAULTS)),
    after=st.lists(st.sampled_from(KEEPS_SHAPE), max_size=5),
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_any_program_names_its_planted_fault_and_no_hidden_one(before, fault, after) -> None:
    def prefix(x: Tensor) -> Tensor:
        for kind, name in before:
            if kind == "carry":
                x = CARRIERS[name](x).clamp(-5, 5)
            else:
                bad = FAULTS[name](x)
                x = torch.where(torch.isfinite(bad), bad, x)
        return x

    with Ledger({}, ()) as ledger:
        x = prefix(X.clone())
        assert torch.isfinite(x).all()
        start = ledger.count
        x = FAULTS[fault](x)
        stop = ledger.count
        for name in after:
            x = CARRIERS[name](x)
        found = ledger.origin_of(x)
    assert found is not None and found.operation == fault and start <= found.number < stop
