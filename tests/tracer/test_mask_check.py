"""A mask that leaves a valid token without keys is named in every form that masks take."""

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from npt.adapters.stream import open_stream
from npt.batch import batch_from_tensors
from npt.tracer.mask_check import MASKED, mask_fault

NAN, INF = math.nan, math.inf
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda mask: mask,
    "-inf": lambda mask: torch.where(mask, 0.0, -INF),
    "finfo.min": lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min),
    "finite": lambda mask: torch.where(mask, 0.0, -1e9),
}


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


def causal(valid: Tensor) -> Tensor:
    """[B, 1, T, T], causal and valid, nothing done about rows without a key."""
    size = valid.shape[1]
    return (torch.ones(size, size, dtype=torch.bool).tril() & valid[:, None, :].bool())[:, None]


@pytest.mark.parametrize("form", FORMS)
def test_a_valid_token_without_a_key_is_named(form) -> None:
    valid = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    mask = causal(valid)
    assert not mask[1, 0, 0].any()  # a padded token's, which is normal
    assert mask_fault(FORMS[form](mask), valid) is None

    mask[1, :, 3] = False
    finding = mask_fault(FORMS[form](mask), valid)
    assert finding is not None and finding.index == (1, 3)
    said = finding.message
    dtype = "bool" if form == "bool" else "float32"
    assert f"attention mask [2, 1, 4, 4] {dtype}: " in said and "\n" not in said
    assert "the valid token at [b=1, t=3] may attend to nothing" in said
    assert "; 1 of 6 valid tokens affected" in said


def booleans(*shape: int) -> st.SearchStrategy:
    drawn = st.booleans()
    for length in reversed(shape):
        drawn = st.lists(drawn, min_size=length, max_size=length)
    return drawn.map(torch.tensor)


@given(booleans(2, 4, 3), booleans(2, 4), st.sampled_from(sorted(FORMS)))
@settings(deadline=None, max_examples=80, derandomize=True)
def test_rows_without_a_key_are_counted_in_every_form(rows, valid, form) -> None:
    finding = mask_fault(FORMS[form](rows[:, None]), valid)
    keyless = [(b, t) for b in range(2) for t in range(4) if not rows[b, t].any()]
    bad = [place for place in keyless if valid[place]]
    assert (finding is not None) == bool(bad)
    if finding is not None:
        assert finding.index == bad[0]
        assert f"; {len(bad)} of {int(valid.sum())} valid tokens affected" in finding.message


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_stand_in_for_minus_infinity_is_recognised(dtype) -> None:
    lowest = torch.finfo(dtype).min
    for value in (-INF, lowest, lowest / 2, -1e4, *((-1e9,) if dtype != torch.float16 else ())):
        mask = torch.zeros(1, 1, 3, 3, dtype=dtype)
        mask[..., 1, :] = value
        finding = mask_fault(mask, ones(1, 3))
        assert finding is not None and finding.index == (0, 1), value
        assert finding.value == float(torch.tensor(value, dtype=dtype))


def test_the_line_between_masked_and_biased() -> None:
    assert MASKED == -1e3
    assert mask_fault(torch.full((1, 1, 1, 1), MASKED), ones(1, 1)) is not None
    assert mask_fault(torch.full((1, 1, 1, 1), 0.99 * MASKED), ones(1, 1)) is None


def test_a_bias_by_distance_is_no_mask() -> None:
    # one query's, down to -14000: lower than what older code masks with
    far = -0.7 * torch.arange(20_000.0)[None, None, None]
    assert far.min() < -1e4 and mask_fault(far, ones(1, 1)) is None
    assert mask_fault(torch.zeros(1, 1, 3, 3), ones(1, 3)) is None


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_unusable_entry_is_named_on_padded_rows_too(dtype, value) -> None:
    valid = torch.tensor([[0, 1, 1]])
    mask = torch.zeros(1, 1, 3, 3, dtype=dtype)
    mask[0, 0, 0] = -INF
    mask[0, 0, 0, 2] = value
    for _ in range(2):
        finding = mask_fault(mask, valid)
        assert finding is not None and finding.index == (0, 0)
        assert "1 entries are NaN or +Inf" in finding.message
        assert str(finding.value) == str(value)
        mask[0, 0, 2] = -INF  # a valid row without a key comes second


def test_one_head_without_a_key_is_enough() -> None:
    mask = torch.zeros(1, 3, 4, 4)
    mask[0, 1, 2] = -1e4
    finding = mask_fault(mask, ones(1, 4))
    assert finding is not None and (finding.index, finding.value) == ((0, 2), -1e4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_masks_that_transformers_makes_are_sound(load_model, implementation, padding) -> None:
    llama = load_model()
    llama.set_attn_implementation(implementation)
    valid = ones(2, 6)
    valid[1, slice(0, 3) if padding == "left" else slice(4, 6)] = 0
    batch = batch_from_tensors(torch.where(valid.bool(), 7, 2), valid)
    assert mask_fault(open_stream(llama, batch).masks[0], valid) is None
