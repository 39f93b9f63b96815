"""Places: the module and the line are those that ran, and an element's token is the right one or
none.
"""

import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from npt.batch import Batch, batch_from_tensors
from npt.tracer.source_location import Stack, Tokens, layer_of, plain_name, read_stack


def module_names(model: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


# --- layers


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.5.mlp.act_fn", 5),
        ("transformer.h.3", 3),
        ("model.layers.12.mlp.experts.3.up_proj", 12),
        ("0", 0),
        ("layers.07.x", 7),
        ("base_model.model.model.layers.31.self_attn.q_proj", 31),
        ("lm_head", None),
        ("conv2d.layer1x", None),
        ("", None),
    ],
)
def test_the_layer_is_the_first_whole_number_of_a_dotted_name(name, layer) -> None:
    assert layer_of(name) == layer


# --- stacks


class Look(nn.Module):
    """Reads the stack in its forward."""

    def forward(self, read):
        return read()


def helper(module, read):
    return read()


def unrelated(first, read):
    return read()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Look() for _ in range(3))
        self.inner = nn.Sequential(Look())

    def forward(self, read, how):
        if how == "own":
            return read()
        if how == "sub":
            return self.inner(read)
        if how == "helper":
            return helper(self.layers[1], read)
        if how == "unrelated":
            return unrelated(3, read)
        if how == "loop":
            for i, layer in enumerate(self.layers):
                if i == 2:
                    return (read(), layer)[0]
        for layer in self.layers:
            layer(lambda: None)
        return read()


def stack(how: str) -> Stack:
    model = Model()
    names = module_names(model)
    return model(lambda: read_stack(sys._getframe(), names), how)


@pytest.mark.parametrize(
    ("how", "module"),
    [
        ("own", ""),
        ("sub", "inner.0"),
        ("helper", "layers.1"),
        ("unrelated", ""),
        ("loop", "layers.2"),
        ("after the loop", ""),
    ],
)
def test_the_module_is_the_one_that_the_code_works_for(how, module) -> None:
    assert stack(how).place.module == module


def test_a_loop_in_a_named_modules_forward_is_that_modules_code() -> None:
    names = module_names(nn.ModuleDict({"block": (block := Model())}))
    assert block(lambda: read_stack(sys._getframe(), names), "loop").place.module == "block"


def test_the_line_is_the_first_of_no_library_and_shows_the_expression() -> None:
    found: list[Stack] = []
    activation = nn.Sequential(nn.ReLU())
    activation[0].forward = lambda x: found.append(read_stack(sys._getframe(1), {})) or x
    activation(torch.ones(2)).sum()
    assert found[0].place.source.startswith("test_source_location.py:")
    assert found[0].place.source.endswith(": activation(torch.ones(2))")


def test_the_cell_of_a_notebook_is_called_so() -> None:
    """Jupyter keeps it in a file named by a number, in a folder of the process."""
    path = "/x/ipykernel_2718/314159265.py"
    code = compile("\n\nfound = read_stack(sys._getframe(), {})", path, "exec")
    scope = {"read_stack": read_stack, "sys": sys}
    exec(code, scope)
    assert scope["found"].place.source.startswith("cell:3 in <module>")


# --- tokens


def padded(lengths: list[int], width: int) -> Batch:
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    return batch_from_tensors(
        torch.ones_like(mask), mask, tuple(f"s{i}" for i in range(len(lengths)))
    )


BATCH = padded([6, 4, 3], 6)  # B 3, T 6, N 13


@pytest.mark.parametrize(
    ("shape", "index", "row", "token"),
    [
        ((3, 6, 8), (1, 2, 7), 1, 2),
        ((3, 6), (2, 0), 2, 0),
        ((3, 4, 6, 6), (1, 3, 5, 0), 1, 5),
        ((12, 6, 6), (7, 4, 0), 1, 4),
        ((18, 8), (13, 0), 2, 1),
        ((13, 8), (6, 0), 1, 0),
        ((26, 8), (13 + 10, 0), 2, 0),
        ((3,), (2,), 2, None),
        ((3, 9), (1, 8), 1, None),
        ((6, 8), (2, 0), None, None),
        ((), (), None, None),
        ((5, 7), (1, 1), None, None),
    ],
)
def test_an_elements_token_is_read_off_every_documented_shape(shape, index, row, token) -> None:
    sample = None if row is None else f"s{row}"
    assert Tokens(BATCH).locate(shape, index) == (row, token, sample)


@pytest.mark.parametrize(
    ("lengths", "shape", "index"),
    [
        ([6, 4, 3], (3, 6, 6, 8), (1, 2, 5, 0)),  # heads as many as tokens: which axis is time?
        ([6, 3, 0], (18, 8), (12, 0)),  # 2 N = B T: stacked rows or all rows?
        ([5, 4, 3], (12, 6, 6), (5, 1, 1)),  # N = B heads: gathered rows or heads?
    ],
)
def test_a_shape_that_can_be_read_in_two_ways_tells_no_token(lengths, shape, index) -> None:
    row, token, sample = Tokens(padded(lengths, 6)).locate(shape, index)
    assert token is None
    assert (row is None) == (sample is None)


def test_a_shape_that_a_weight_has_as_well_tells_nothing() -> None:
    weights = {(18, 8), (5, 13), (13,)}
    for shape in ((18, 8), (8, 18), (13, 5), (13,)):
        assert Tokens(BATCH, weights).locate(shape, (4,) * len(shape)) == (None, None, None)
    assert Tokens(BATCH, weights).locate((18, 9), (13, 0)) == (2, 1, "s2")


def test_a_scalar_has_no_padding_in_an_empty_batch_either() -> None:
    tokens = Tokens({"attention_mask": torch.ones(0, 5)})
    assert tokens.without_padding(torch.tensor(2.0)) == 2.0


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod", ""),
        ("_orig_mod._orig_mod.a.w", "a.w"),
        ("a._orig_mod._orig_mod.b", "a.b"),
        ("a._orig_mod", "a"),
        ("an_orig_model.b", "an_orig_model.b"),
    ],
)
def test_a_plain_name_is_without_all_that_compilation_adds(name, plain) -> None:
    assert plain_name(name) == plain


def test_a_mapping_tells_rows_and_tokens_and_anything_else_nothing() -> None:
    ids = torch.ones(2, 5, dtype=torch.int64)
    assert Tokens({"input_ids": ids}).locate((2, 5, 4), (1, 3, 0)) == (1, 3, None)
    assert Tokens({"inputs_embeds": torch.ones(2, 5, 4)}).locate((10, 4), (7, 0)) == (1, 2, None)
    for batch in (None, {"x": ids}, {"input_ids": [1, 2]}, (ids,), ids):
        assert Tokens(batch).locate((2, 5), (1, 3)) == (None, None, None)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    extra=st.integers(0, 2),
    heads=st.integers(1, 5),
    form=st.sampled_from(["states", "heads", "merged heads", "flat", "gathered", "stacked"]),
    data=st.data(),
)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_a_documented_shape_gives_the_right_token_or_none(
    lengths, extra, heads, form, data
) -> None:
    width = max(lengths) + extra
    batch = padded(lengths, width)
    b, n = len(lengths), sum(lengths)
    places = [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    at = data.draw(st.integers(0, n - 1))
    row, token = places[at]
    head = data.draw(st.integers(0, heads - 1))
    shape, index = {
        "states": ((b, width, 7), (row, token, 3)),
        "heads": ((b, heads, width, 7), (row, head, token, 3)),
        "merged heads": ((b * heads, width, 7), (row * heads + head, token, 3)),
        "flat": ((b * width, 7), (row * width + token, 3)),
        "gathered": ((n, 7), (at, 3)),
        "stacked": ((2 * n, 7), (at + n * data.draw(st.integers(0, 1)), 3)),
    }[form]
    found_row, found_token, found_sample = Tokens(batch).locate(shape, index)
    assert found_row in (row, None) and found_token in (token, None)
    assert found_sample == (None if found_row is None else f"s{found_row}")
