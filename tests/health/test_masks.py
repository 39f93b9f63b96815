"""Masks in which every row has a key, the look at other masks, and the proof that padding moves
nothing valid by a single bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, softmax
from torch.testing import assert_close
from transformers import DynamicCache

from npt.adapters.stream import open_stream
from npt.data.batch import Batch, batch_from_tensors
from npt.diagnostics.tracer.masks import (
    FINITE,
    MASKED,
    NON_FINITE,
    cross_attention_mask,
    inspect_mask,
    mask_fault,
    padding_influence,
    self_attention_mask,
    zero_padded,
)

NAN, INF = math.nan, math.inf
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

VALID = {
    "left": torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]),
    "right": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
    "both": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]),
    "holes": torch.tensor([[0, 1, 0, 1, 1, 0], [1, 0, 1, 1, 0, 1]]),
}
PADDED = pytest.mark.parametrize("padding", VALID)

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda mask: mask,
    "-inf": lambda mask: torch.where(mask, 0.0, -INF),
    "finfo.min": lambda mask: torch.where(mask, 0.0, torch.finfo(torch.float32).min),
    "finite": lambda mask: torch.where(mask, 0.0, -1e9),
}


def careless(valid: Tensor) -> Tensor:
    """Causal and valid, and nothing done about rows without a key: [B, 1, T, T]."""
    size = valid.shape[1]
    return (torch.ones(size, size, dtype=torch.bool).tril() & valid[:, None, :].bool())[:, None]


# --- building
# --------------------------------------------------------------------------------------------------------


@st.composite
def self_attention(draw) -> tuple[Tensor, Tensor, bool, Tensor | None]:
    size, past, queries = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 5))

    def rows(length: int, values: st.SearchStrategy) -> Tensor:
        return torch.tensor(
            draw(
                st.lists(
                    st.lists(values, min_size=length, max_size=length), min_size=size, max_size=size
                )
            )
        )

    documents = rows(past + queries, st.integers(0, 2)) if draw(st.booleans()) else None
    valid = rows(past + queries, st.integers(0, 1))
    return valid[:, past:], valid[:, :past], draw(st.booleans()), documents


@given(self_attention())
@settings(deadline=None, max_examples=150, derandomize=True)
def test_every_row_of_self_attention_has_a_key_and_a_valid_one_only_keys_that_it_may_see(
    drawn,
) -> None:
    valid_q, valid_past, causal, documents = drawn
    keys, past = torch.cat([valid_past, valid_q], dim=1), valid_past.shape[1]
    mask = self_attention_mask(
        valid_q, valid_past=valid_past, causal=causal, document_ids=documents
    )
    assert mask.dtype == torch.bool and mask.shape == (
        len(keys),
        1,
        valid_q.shape[1],
        keys.shape[1],
    )
    assert inspect_mask(mask).keyless_valid == 0
    for b, row in enumerate(mask[:, 0].tolist()):
        for t, seen in enumerate(row):
            allowed = {
                s
                for s in range(keys.shape[1])
                if keys[b, past + t]
                and keys[b, s]
                and (s <= past + t or not causal)
                and (documents is None or documents[b, s] == documents[b, past + t])
            }
            # Rescued is exactly the row that would be without a key, which is that of a padded
            # query.
            assert bool(allowed) == bool(valid_q[b, t])
            assert {s for s, sees in enumerate(seen) if sees} == (allowed or {past + t})


@given(
    st.integers(1, 3).flatmap(
        lambda size: st.tuples(
            *(
                st.integers(1, 5).flatmap(
                    lambda length: st.lists(
                        st.lists(st.integers(0, 1), min_size=length, max_size=length),
                        min_size=size,
                        max_size=size,
                    )
                )
                for _ in range(2)
            )
        )
    )
)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_every_row_of_cross_attention_has_a_key_and_a_valid_one_only_valid_keys(drawn) -> None:
    valid_q, valid_enc = map(torch.tensor, drawn)
    mask = cross_attention_mask(valid_q, valid_enc)
    assert mask.dtype == torch.bool and mask.shape == (
        len(valid_q),
        1,
        valid_q.shape[1],
        valid_enc.shape[1],
    )
    assert inspect_mask(mask).keyless_valid == 0
    for b, row in enumerate(mask[:, 0].tolist()):
        keys = [s for s, valid in enumerate(valid_enc[b].tolist()) if valid]
        for t, seen in enumerate(row):
            assert [s for s, sees in enumerate(seen) if sees] == (
                keys if valid_q[b, t] and keys else keys[:1] or [0]
            )


def test_a_left_padded_row_and_a_packed_one_look_as_they_should() -> None:
    mask = self_attention_mask(
        torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        document_ids=torch.tensor([[0, 0, 0, 0], [7, 7, 9, 9]]),
    )
    assert mask[:, 0].int().tolist() == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
    ]


@PADDED
@pytest.mark.parametrize("past", range(6))
def test_the_mask_of_a_cached_step_is_the_end_of_the_whole_one(padding, past) -> None:
    valid = VALID[padding]
    whole = self_attention_mask(valid)
    assert torch.equal(
        self_attention_mask(valid[:, past:], valid_past=valid[:, :past]), whole[:, :, past:]
    )


@PADDED
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_additive_form_says_the_same_in_the_lowest_finite_number(padding, dtype) -> None:
    valid = VALID[padding]
    for build in (
        self_attention_mask,
        lambda valid, **form: cross_attention_mask(valid, valid.flip(1), **form),
    ):
        mask, additive = build(valid), build(valid, dtype=dtype)
        assert additive.dtype == dtype and torch.isfinite(additive).all()
        assert torch.equal(
            additive,
            torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min),
        )


def test_validity_as_bool_and_as_ones_and_zeros_is_the_same() -> None:
    valid = VALID["holes"]
    assert torch.equal(self_attention_mask(valid), self_attention_mask(valid.bool()))
    assert torch.equal(
        cross_attention_mask(valid, valid.flip(1)),
        cross_attention_mask(valid.bool(), valid.flip(1).bool()),
    )


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_an_empty_batch_has_an_empty_mask(shape) -> None:
    valid = torch.ones(shape, dtype=torch.bool)
    assert self_attention_mask(valid).shape == (shape[0], 1, shape[1], shape[1])
    assert cross_attention_mask(valid, torch.ones(shape[0], 3, dtype=torch.bool)).shape == (
        shape[0],
        1,
        shape[1],
        3,
    )


ONES = torch.ones(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: self_attention_mask(torch.ones(2, 4)),
            r"valid_q is torch.float32 \[2, 4\]; it has to be \[B, T\] and bool, or integers",
        ),
        (lambda: self_attention_mask(ONES[0]), r"valid_q is torch.int64 \[4\]"),
        (
            lambda: self_attention_mask(ONES, valid_past=ONES[:, None]),
            r"valid_past is torch.int64 \[2, 1, 4\]",
        ),
        (
            lambda: self_attention_mask(ONES, valid_past=ONES, document_ids=ONES),
            r"document_ids is \[2, 4\]; .* keys \[2, 8\]",
        ),
        (
            lambda: self_attention_mask(ONES, dtype=torch.int64),
            "a mask of torch.int64 is neither bool nor added",
        ),
        (lambda: cross_attention_mask(ONES, ONES * 1.0), "valid_enc is torch.float32"),
        (
            lambda: cross_attention_mask(ONES, ONES[:, :0]),
            r"valid_enc is \[2, 0\]: no position to attend to",
        ),
        (lambda: zero_padded(torch.ones(2, 4, 3), ONES * 1.0), "valid is torch.float32"),
        (
            lambda: inspect_mask(ONES),
            r"attention mask is torch.int64 \[2, 4\]; .* self_attention_mask",
        ),
        (lambda: inspect_mask(torch.zeros(4)), r"attention mask is torch.float32 \[4\]"),
        (
            lambda: inspect_mask(torch.zeros(3, 1, 4, 4), ONES),
            r"rows for \[3, 4\] queries, valid_q is \[2, 4\]",
        ),
        (
            lambda: inspect_mask(torch.zeros(2, 1, 4, 4), ONES[:1]),
            r"rows for \[2, 4\] queries, valid_q is \[1, 4\]",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(call, message) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


# --- zeroing
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_padding_is_zeroed_whatever_stands_there_and_its_gradient_as_well(dtype, value) -> None:
    valid = VALID["both"]
    there = valid.bool()[..., None].expand(2, 6, 3)
    states = torch.arange(1.0, 37.0).view(2, 6, 3).to(dtype)
    poisoned = states.masked_fill(~there, value).requires_grad_()
    zeroed = zero_padded(poisoned, valid)
    assert zeroed.dtype == dtype and torch.equal(zeroed, states.masked_fill(~there, 0.0))
    zeroed.backward(states.masked_fill(~there, value))
    assert torch.equal(poisoned.grad, states.masked_fill(~there, 0.0))


# --- looking
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_valid_token_without_a_key_is_named_and_a_padded_one_is_normal(form) -> None:
    valid = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    mask = careless(valid)
    assert not mask[1, 0, 0].any()
    report = inspect_mask(FORMS[form](mask), valid)
    assert (report.form, report.keyless_valid, report.keyless_padded, report.first) == (
        form,
        0,
        2,
        (1, 0),
    )
    assert report.sound and "only padded tokens may attend to nothing, first [b=1, t=0]" in str(
        report
    )
    assert mask_fault(FORMS[form](mask), valid) is None

    mask[1, :, 3] = False
    report = inspect_mask(FORMS[form](mask), valid)
    assert (report.keyless_valid, report.keyless_padded, report.rows, report.first) == (
        1,
        2,
        8,
        (1, 3),
    ) and not report.sound
    finding = mask_fault(FORMS[form](mask), valid)
    assert finding is not None and finding.index == (1, 3)
    assert (
        "the valid token at [b=1, t=3] may attend to nothing" in finding.message
        and "\n" not in finding.message
    )
    assert ("finite and wrong" in finding.message) == (form in ("finfo.min", "finite"))


@given(
    st.lists(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=4, max_size=4),
        min_size=2,
        max_size=2,
    ),
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=2, max_size=2),
    st.sampled_from(sorted(FORMS)),
)
@settings(deadline=None, max_examples=80, derandomize=True)
def test_the_rows_without_a_key_are_counted_in_every_form(rows, valid, form) -> None:
    report = inspect_mask(FORMS[form](torch.tensor(rows)), torch.tensor(valid))
    without = [(b, t) for b in range(2) for t in range(4) if not any(rows[b][t])]
    valid_ones = [(b, t) for b, t in without if valid[b][t]]
    assert (report.keyless_valid, report.keyless_padded) == (
        len(valid_ones),
        len(without) - len(valid_ones),
    )
    assert report.first == ((valid_ones or without)[0] if without else None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_whatever_has_stood_for_minus_infinity_is_recognised(dtype) -> None:
    lowest = torch.finfo(dtype).min
    for value in (-INF, lowest, lowest / 2, -1e4, *((-1e9,) if dtype != torch.float16 else ())):
        mask = torch.zeros(1, 1, 3, 3, dtype=dtype)
        mask[..., 1, :] = value
        report = inspect_mask(mask)
        assert (report.keyless_valid, report.first) == (1, (0, 1)), value
        assert report.form == {-INF: "-inf", lowest: "finfo.min"}.get(value, "finite")
        assert report.value == float(torch.tensor(value, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_lowest_number_of_a_wider_dtype_is_minus_infinity_after_a_cast(dtype) -> None:
    mask = self_attention_mask(VALID["left"], dtype=torch.float32)
    assert inspect_mask(mask).form == "finfo.min"
    assert inspect_mask(mask.to(dtype)).form == "-inf"


def test_the_line_between_masked_and_biased_is_where_it_is_said_to_be() -> None:
    assert inspect_mask(torch.full((1, 1), MASKED)).keyless_valid == 1
    assert inspect_mask(torch.full((1, 1), 0.99 * MASKED)).keyless_valid == 0
    assert MASKED == -1e3


def test_a_row_masked_twice_over_is_without_a_key_in_a_mixed_form() -> None:
    mask = torch.tensor([[-INF, torch.finfo(torch.float32).min], [0.0, -1e9]])
    report = inspect_mask(mask)
    assert (report.form, report.keyless_valid, report.first) == ("mixed", 1, (0, 0))


def test_a_bias_by_distance_is_no_mask() -> None:
    # one query's, down to -14000: lower than what older code masks with
    far = -0.7 * torch.arange(20_000.0)[None]
    assert far.min() < -1e4 and inspect_mask(far).keyless_valid == 0
    assert inspect_mask(torch.zeros(3, 3)).form == "open"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_entry_that_no_softmax_can_take_is_named_on_padded_rows_too(dtype, value) -> None:
    valid = torch.tensor([[0, 1, 1]])
    mask = self_attention_mask(valid, dtype=dtype)
    mask[0, 0, 0] = -INF
    mask[0, 0, 0, 2] = value
    finding = mask_fault(mask, valid)
    assert (
        finding is not None
        and finding.index == (0, 0)
        and "1 entries are NaN or +Inf" in finding.message
    )
    assert str(finding.value) == str(value)
    assert inspect_mask(mask, valid).keyless_padded == 0  # another fault, told apart
    mask[0, 0, 2] = -INF
    assert (
        inspect_mask(mask, valid).first == (0, 0) and inspect_mask(mask, valid).keyless_valid == 1
    )


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_fewer_dimensions_and_of_one_row_for_all_are_taken(form) -> None:
    valid = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    for shaped in (mask, mask.expand(2, 4, 4), mask.expand(1, 1, 4, 4), mask.expand(2, 3, 4, 4)):
        report = inspect_mask(FORMS[form](shaped), valid)
        assert (report.keyless_valid, report.keyless_padded, report.first) == (2, 0, (0, 2))
    # one row for all queries, as encoders have it
    nothing = torch.zeros(2, 1, 1, 4, dtype=torch.bool)
    nothing[0] = True
    report = inspect_mask(FORMS[form](nothing), valid)
    assert (report.keyless_valid, report.keyless_padded, report.first) == (4, 0, (1, 0))


def test_one_head_without_a_key_is_enough() -> None:
    mask = torch.zeros(1, 3, 4, 4)
    mask[0, 1, 2] = -1e4
    finding = mask_fault(mask)
    assert finding is not None and (finding.index, finding.value) == ((0, 2), -1e4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_without_keys_or_without_rows_is_taken(dtype) -> None:
    assert inspect_mask(torch.zeros(2, 1, 3, 0, dtype=dtype)).keyless_valid == 6
    assert inspect_mask(torch.zeros(0, 1, 3, 3, dtype=dtype)).sound


# --- kernels
# ---------------------------------------------------------------------------------------------------------

Attention = Callable[..., Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (
        softmax(q @ k.mT / math.sqrt(q.shape[-1]) + mask, dim=-1, dtype=torch.float32).to(q.dtype)
        @ v
    )


def by_kernel(backend: SDPBackend) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **arguments) -> Tensor:
        with sdpa_kernel(backend):  # raises where the kernel cannot be had
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, **arguments)

    return attend


MATH, FLASH = by_kernel(SDPBackend.MATH), by_kernel(SDPBackend.FLASH_ATTENTION)
# (kernel, form): eager attention has no bool form. Memory-efficient and cuDNN kernels exist on a
# GPU only.
KERNELS = {
    "eager": (eager, "additive"),
    "math-bool": (MATH, "bool"),
    "math-additive": (MATH, "additive"),
    "flash-bool": (FLASH, "bool"),
    "flash-additive": (FLASH, "additive"),
}
EVERY_KERNEL = pytest.mark.parametrize("kernel", KERNELS)


def attention(attend: Attention, mask: Tensor | None, **arguments) -> Callable[[Tensor], Tensor]:
    """Attention of states [B, T, D] to themselves, 2 heads."""

    def run(states: Tensor) -> Tensor:
        heads = states.unflatten(-1, (2, -1)).transpose(1, 2)
        return (
            attend(heads, heads.roll(1, -1), 0.5 * heads, mask, **arguments)
            .transpose(1, 2)
            .flatten(2)
        )

    return run


def states_of(valid: Tensor, dtype: torch.dtype = torch.float32, width: int = 32) -> Tensor:
    return torch.randn(*valid.shape, width, generator=torch.Generator().manual_seed(2)).to(
        valid.device, dtype
    )


@EVERY_KERNEL
@PADDED
@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_padding_moves_no_valid_token_by_one_bit(kernel, padding, dtype) -> None:
    valid, (attend, form) = VALID[padding], KERNELS[kernel]
    mask = self_attention_mask(valid, dtype=dtype if form == "additive" else torch.bool)
    assert (
        padding_influence(attention(attend, mask), states_of(valid, dtype), valid, scales=FINITE)
        == 0.0
    )


@EVERY_KERNEL
@pytest.mark.parametrize("scale", NON_FINITE)
def test_padding_that_is_not_finite_passes_every_mask_unless_it_is_zeroed_first(
    kernel, scale
) -> None:
    valid, (attend, form) = VALID["both"], KERNELS[kernel]
    run = attention(
        attend,
        self_attention_mask(valid, dtype=torch.float32 if form == "additive" else torch.bool),
    )
    assert padding_influence(run, states_of(valid), valid, scales=[scale]) == INF  # 0 * NaN is NaN
    assert (
        padding_influence(lambda states: run(zero_padded(states, valid)), states_of(valid), valid)
        == 0.0
    )


@EVERY_KERNEL
@pytest.mark.parametrize("padding", ["left", "right"])
def test_encoder_padding_moves_no_query_and_an_empty_encoder_row_stays_finite(
    kernel, padding
) -> None:
    valid_q, (attend, form) = VALID[padding], KERNELS[kernel]
    valid_enc = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]])
    meant = valid_q.bool() & valid_enc.any(-1, keepdim=True)
    mask = cross_attention_mask(
        valid_q, valid_enc, dtype=torch.float32 if form == "additive" else torch.bool
    )
    queries = states_of(valid_q)

    def run(encoded: Tensor) -> Tensor:
        q, k = (states.unflatten(-1, (2, -1)).transpose(1, 2) for states in (queries, encoded))
        return zero_padded(attend(q, k, k.roll(1, -1), mask).transpose(1, 2).flatten(2), meant)

    encoded = states_of(valid_enc)
    assert padding_influence(run, encoded, valid_enc, valid_out=valid_q, scales=FINITE) == 0.0
    assert (
        padding_influence(
            lambda states: run(zero_padded(states, valid_enc)),
            encoded,
            valid_enc,
            valid_out=valid_q,
        )
        == 0.0
    )
    output = run(encoded)
    assert torch.isfinite(output).all() and output[0].any() and not output[1].any()


@EVERY_KERNEL
@PADDED
def test_kernels_agree_on_valid_tokens_and_on_padded_ones_too(kernel, padding) -> None:
    valid, (attend, form) = VALID[padding], KERNELS[kernel]
    expected = attention(eager, self_attention_mask(valid, dtype=torch.float64))(
        states_of(valid, torch.float64)
    ).float()
    mask = self_attention_mask(valid, dtype=torch.float32 if form == "additive" else torch.bool)
    # default tolerance of fp32: sums in another order
    assert_close(attention(attend, mask)(states_of(valid)), expected)


@pytest.mark.parametrize("attend", [MATH, FLASH], ids=["math", "flash"])
def test_padding_on_the_right_needs_no_mask_in_a_causal_kernel(attend) -> None:
    valid = VALID["right"]
    assert (
        padding_influence(
            attention(attend, None, is_causal=True), states_of(valid), valid, scales=FINITE
        )
        == 0.0
    )
    valid = VALID["left"]
    assert (
        padding_influence(
            attention(attend, None, is_causal=True), states_of(valid), valid, scales=FINITE
        )
        > 0.1
    )


def test_a_leak_is_measured() -> None:
    valid = VALID["left"]
    mask = self_attention_mask(valid)
    mask[1, 0, 5, 0] = True
    assert padding_influence(attention(FLASH, mask), states_of(valid), valid, scales=[1.0]) > 0.01
    # Added to scores, True is 1 and masks nothing.
    assert (
        padding_influence(
            attention(eager, self_attention_mask(valid)), states_of(valid), valid, scales=[1.0]
        )
        > 0.01
    )


def test_of_outputs_that_are_not_finite_nothing_is_proven() -> None:
    valid = VALID["left"]
    assert padding_influence(lambda states: states * NAN, states_of(valid), valid) == INF
    assert padding_influence(lambda states: states / 0.0, states_of(valid), valid) == INF
    assert padding_influence(lambda states: states, states_of(valid), valid) == 0.0
    assert (
        padding_influence(lambda states: states, states_of(valid), torch.zeros_like(valid)) == 0.0
    )


def test_one_row_without_a_key_poisons_the_gradient_of_every_key_and_a_spare_key_none() -> None:
    valid = VALID["left"]

    def gradients(mask: Tensor) -> list[Tensor]:
        q, k, v = (
            states_of(valid).unsqueeze(1).mul(factor).requires_grad_()
            for factor in (1.0, -1.0, 0.5)
        )
        zero_padded(eager(q, k, v, mask).squeeze(1), valid).square().sum().backward()
        return [t.grad.squeeze(1) for t in (q, k, v)]

    poisoned = gradients(FORMS["-inf"](careless(valid)))
    # although the padded outputs were zeroed
    assert all(torch.isnan(grad[1][valid[1].bool()]).all() for grad in poisoned[1:])
    for grad in gradients(self_attention_mask(valid, dtype=torch.float32)):
        assert torch.isfinite(grad).all() and grad[valid.bool()].any()
        # what a valid output depends on, seen from the other side
        assert not grad[~valid.bool()].any()


# --- a whole model
# ---------------------------------------------------------------------------------------------------

FORM_OF = {"eager": torch.float32, "sdpa": torch.bool}
EACH_IMPLEMENTATION = pytest.mark.parametrize("implementation", FORM_OF)


@pytest.fixture(scope="module")
def llama(load_model):
    return load_model()


def batch_of(valid: Tensor) -> Batch:
    ids = torch.randint(3, 128, valid.shape, generator=torch.Generator().manual_seed(4))
    return batch_from_tensors(torch.where(valid.bool(), ids, 2), valid)


def logits_with(model, batch: Batch, mask: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda states: (
        model(inputs_embeds=states, attention_mask=mask, position_ids=batch.position_ids).logits
    )


@torch.no_grad()
@EACH_IMPLEMENTATION
@PADDED
def test_no_padded_embedding_of_a_llama_moves_a_valid_logit(llama, implementation, padding) -> None:
    llama.set_attn_implementation(implementation)
    batch = batch_of(VALID[padding])
    valid, embeddings = batch.attention_mask, llama.get_input_embeddings()(batch.input_ids).float()
    run = logits_with(llama, batch, self_attention_mask(valid, dtype=FORM_OF[implementation]))
    assert padding_influence(run, embeddings, valid, scales=FINITE) == 0.0
    assert padding_influence(run, embeddings, valid, scales=[NAN]) == INF
    assert (
        padding_influence(lambda states: run(zero_padded(states, valid)), embeddings, valid) == 0.0
    )
    # No tolerance: valid rows of both masks are the same. Of padded rows only the spare key keeps
    # them finite in every kernel.
    own = llama(batch.input_ids, attention_mask=valid, position_ids=batch.position_ids).logits
    assert torch.equal(run(embeddings)[valid.bool()], own[valid.bool()])
    assert torch.isfinite(run(zero_padded(embeddings, valid))).all()


@torch.no_grad()
def test_a_padded_row_without_a_key_reaches_valid_tokens_in_the_layer_after(llama) -> None:
    llama.set_attn_implementation("eager")
    batch = batch_of(VALID["left"])
    valid = batch.attention_mask.bool()
    zeroed = zero_padded(llama.get_input_embeddings()(batch.input_ids), valid)
    assert torch.isnan(
        logits_with(llama, batch, FORMS["-inf"](careless(valid)))(zeroed)[1][valid[1]]
    ).all()
    assert torch.isfinite(
        logits_with(llama, batch, FORMS["-inf"](self_attention_mask(valid)))(zeroed)
    ).all()


@torch.no_grad()
@EACH_IMPLEMENTATION
def test_a_padded_row_comes_out_as_it_does_alone(llama, implementation) -> None:
    llama.set_attn_implementation(implementation)
    batch = batch_of(VALID["both"])
    mask = self_attention_mask(batch.attention_mask, dtype=FORM_OF[implementation])
    logits = logits_with(llama, batch, mask)(llama.get_input_embeddings()(batch.input_ids))
    for row, valid in enumerate(batch.attention_mask.bool()):
        # fp32, sums over other lengths
        assert_close(logits[row, valid], llama(batch.input_ids[row, valid][None]).logits[0])


@torch.no_grad()
@EACH_IMPLEMENTATION
def test_cached_steps_come_out_as_the_whole_sequence(llama, implementation) -> None:
    llama.set_attn_implementation(implementation)
    batch = batch_of(VALID["left"])
    valid, form = batch.attention_mask, FORM_OF[implementation]
    whole = logits_with(llama, batch, self_attention_mask(valid, dtype=form))(
        llama.get_input_embeddings()(batch.input_ids)
    )
    cache, parts = DynamicCache(config=llama.config), []
    for start, end in ((0, 4), (4, 5), (5, 6)):
        mask = self_attention_mask(valid[:, start:end], valid_past=valid[:, :start], dtype=form)
        step = slice(start, end)
        parts.append(
            llama(
                batch.input_ids[:, step],
                attention_mask=mask,
                position_ids=batch.position_ids[:, step],
                past_key_values=cache,
            )
        )
    # fp32, sums over other lengths
    assert_close(torch.cat([part.logits for part in parts], dim=1), whole)


@pytest.mark.parametrize(
    ("implementation", "padding", "form", "keyless"),
    [
        ("eager", "right", "finfo.min", 0),
        ("eager", "left", "finfo.min", 3),
        ("sdpa", "right", "bool", 0),
        ("sdpa", "left", "bool", 3),
    ],
)
def test_the_masks_that_transformers_makes_leave_only_left_padding_without_keys(
    llama, implementation, padding, form, keyless
) -> None:
    llama.set_attn_implementation(implementation)
    batch = batch_of(VALID[padding])
    report = inspect_mask(open_stream(llama, batch).context["attention_mask"], batch.attention_mask)
    assert (report.form, report.keyless_valid, report.keyless_padded, report.sound) == (
        form,
        0,
        keyless,
        True,
    )
    assert report.first == ((1, 0) if keyless else None)


# --- a GPU
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=["math", "efficient"]
)
@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_finite_padding_moves_no_valid_token_in_the_kernels_of_a_gpu(
    backend, padding, form, dtype
) -> None:
    # 288 keys: more than one block of them, and whole blocks masked
    valid = VALID[padding].repeat_interleave(48, dim=1).cuda()
    mask = self_attention_mask(valid, dtype=dtype if form == "additive" else torch.bool)
    assert inspect_mask(mask, valid).keyless_padded == 0
    run = attention(by_kernel(backend), mask)
    states = states_of(valid, dtype, width=128)
    assert padding_influence(run, states, valid, scales=FINITE) == 0.0
    assert padding_influence(lambda given: run(zero_padded(given, valid)), states, valid) == 0.0
    assert torch.isfinite(run(zero_padded(states, valid))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_on_a_gpu_takes_no_mask_and_needs_none_for_padding_on_the_right(dtype) -> None:
    valid = VALID["right"].repeat_interleave(12, dim=1).cuda()
    states = states_of(valid, dtype, width=128)
    with pytest.raises(RuntimeError):
        attention(FLASH, self_attention_mask(valid))(states)
    assert (
        padding_influence(attention(FLASH, None, is_causal=True), states, valid, scales=FINITE)
        == 0.0
    )
