"""The code of a context: what it is, what adding it does, and its file."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from token_students import IDS, student

import npt
from npt.adapters.converted import npt_layers
from npt.adapters.token_modulation import observed
from npt.adapters.trained import ModulationMeter
from npt.batch import Sample
from npt.errors import ConfigError, DataError, ModelError, NumericalError
from npt.tools.editing.context_code import RECORD

QUERY = [9, 33, 17, 70]
CONTEXT = [11, 52, 8, 101, 36]
TOKEN_FORMS = [
    {"targets": ("stream",), "token_rank": 4},
    {"active": 3, "targets": ("stream", "up"), "additive_scale": 0.5},
]


def logits(model, ids=QUERY) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.fixture
def model(load_model):
    return student(load_model)


@pytest.fixture
def code(model):
    return npt.context_code(model, [([*CONTEXT, *QUERY], QUERY)])


def test_added_to_its_query_it_gives_the_code_in_context(load_model):
    """In every converted layer, and for no other token."""
    model = student(load_model)
    code = npt.context_code(model, [([*CONTEXT, *QUERY], QUERY)])
    wanted = npt.modulation_of(model, [*CONTEXT, *QUERY]).codes
    plain, alone = (npt.modulation_of(model, QUERY, t).codes for t in (2, 3))
    with npt.transplanted(model, code, 3, add=True):
        earlier, last = (npt.modulation_of(model, QUERY, t).codes for t in (2, 3))
    for index, values in wanted.items():
        # fp32: z + (w - z) is w up to a rounding of each, also of states in the layers between
        torch.testing.assert_close(last[index], values, rtol=1e-5, atol=1e-6)
        assert not torch.equal(values, alone[index]) and torch.equal(earlier[index], plain[index])


def streams(model, ids) -> dict[int, torch.Tensor]:
    """Return the last token's stream by layer."""
    found = {}

    def keep(index, stages):
        if stages.get("stream") is not None:
            found[index] = stages["stream"][0, -1]

    with observed([(layer.npt, partial(keep, index)) for index, layer in npt_layers(model)]):
        logits(model, ids)
    return found


@torch.no_grad()
@pytest.mark.parametrize("form", TOKEN_FORMS, ids=str)
def test_with_a_token_part_it_brings_the_stream_nearest(load_model, form):
    """What still differs from the stream in context lies outside the adapter's directions."""
    model = student(load_model, **form)
    code = npt.context_code(model, [([*CONTEXT, *QUERY], QUERY)])
    wanted, before = streams(model, [*CONTEXT, *QUERY]), streams(model, QUERY)
    with npt.transplanted(model, code, 3, add=True):
        after = streams(model, QUERY)
    for index, layer in npt_layers(model):
        directions = layer.npt.B["stream"]
        still, was = (directions.T @ (wanted[index] - each[index]) for each in (after, before))
        # fp32: the pseudo-inverse, and states of the layers between
        assert float(still.norm()) < 1e-3 * float(was.norm())


@pytest.mark.parametrize("form", TOKEN_FORMS, ids=str)
def test_weights_that_are_not_finite_are_named(load_model, form):
    model = student(load_model, **form)
    with torch.no_grad():
        model.model.layers[1].npt.B["stream"][0, 0] = math.nan
    with pytest.raises(NumericalError, match=r"layer 1: the stream of a query.* npt trace"):
        npt.context_code(model, [([*CONTEXT, *QUERY], QUERY)])


def test_its_mean_over_queries_is_exact_in_all_layers(model):
    """Added to them all, although each query needs another change."""
    queries = [QUERY, [5, 44, 70], [88, 70]]
    code = npt.context_code(model, (([*CONTEXT, *q], q) for q in queries), record={"context": "a"})
    wanted = [npt.modulation_of(model, [*CONTEXT, *q]).codes for q in queries]
    found = []
    for query in queries:
        with npt.transplanted(model, code, len(query) - 1, add=True):
            found.append(npt.modulation_of(model, query).codes)
    for index in code.codes:
        mean, expected = (torch.stack([c[index] for c in z]).mean(dim=0) for z in (found, wanted))
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)
    assert code.record["queries"] == 3 and code.record["context"] == "a"


def test_without_a_context_there_is_nothing_to_add(model):
    code, before = npt.context_code(model, [(QUERY, QUERY)]), logits(model)
    assert code.numbers() == {1: 0, 2: 0}
    with npt.transplanted(model, code, None, add=True):
        assert torch.equal(logits(model), before)


def test_scales_and_sums_are_those_of_the_numbers(model, code):
    before = logits(model)
    with npt.transplanted(model, code.scaled(0), 3, add=True):
        assert torch.equal(logits(model), before)
    twice, total = code.scaled(2), code + code.scaled(0.5) + code.scaled(0.5)
    for index, values in code.codes.items():
        assert torch.equal(twice.codes[index], 2 * values)
        assert torch.equal(total.codes[index], twice.codes[index])
    assert twice.scaled(0.25).record["scale"] == 0.5
    half = {**code.record, "scale": 0.5}
    first = {"sum": [code.record, half], "adapter_hash": code.record["adapter_hash"]}
    assert total.record == {**first, "sum": [first, half]}


def test_every_token_gets_it_where_no_position_is_given(model, code):
    plain = [npt.modulation_of(model, QUERY, t).codes[1] for t in range(4)]
    with npt.transplanted(model, code, None, add=True):
        changed = [npt.modulation_of(model, QUERY, t).codes[1] for t in range(4)]
    for one, other in zip(plain, changed, strict=True):
        assert torch.equal(other, one + code.codes[1])
    with npt.transplanted(model, code, None):
        replaced = npt.modulation_of(model, QUERY, 1).codes
    assert all(torch.equal(replaced[i], code.codes[i]) for i in code.codes)


@pytest.mark.parametrize("position", [3, None], ids=["last", "every"])
def test_generating_with_the_cache_gives_the_same_tokens_as_without(model, code, position):
    """The last token of the prompt gets the code once; without a position the new ones do too."""
    ids, code = torch.tensor([QUERY]), code.scaled(20)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    with npt.transplanted(model, code, position, add=True):
        cached, uncached = (model.generate(ids, use_cache=c, **how) for c in (True, False))
    assert torch.equal(cached, uncached) and not torch.equal(cached, model.generate(ids, **how))


def test_a_sum_may_have_more_numbers_than_are_active(load_model):
    model = student(load_model, active=3)
    code = npt.context_code(model, [([*CONTEXT, *QUERY], QUERY)])
    plain = npt.modulation_of(model, QUERY).codes
    with npt.transplanted(model, code, 3, add=True):
        summed = npt.modulation_of(model, QUERY).codes[1]
    either = (plain[1] != 0) | (code.codes[1] != 0)
    assert int(summed.count_nonzero()) <= int(either.sum())
    assert not bool(summed[~either].any())


def test_figures_of_training_passes_are_those_of_the_sum(model, code):
    """The meter stands where codes are added, and puts back what it found."""
    adapters = [layer.npt for _, layer in npt_layers(model)]
    meter = ModulationMeter(adapters)
    with npt.transplanted(model, code, None, add=True):
        before, wanted = [adapter.recode for adapter in adapters], logits(model)
        with meter.measuring():
            assert torch.equal(logits(model), wanted)
        assert [adapter.recode for adapter in adapters] == before
        norms = [npt.modulation_of(model, QUERY, t).codes[1].norm() for t in range(4)]
        assert torch.equal(logits(model), wanted)
    assert float(meter.take()[3]) == pytest.approx(float(sum(norms)))
    assert all(adapter.recode is None for adapter in adapters)


def test_an_evaluation_is_of_the_student_with_the_code_or_refused(model, code):
    samples = [Sample("a", tuple(IDS), tuple(IDS)), Sample("b", tuple(QUERY), tuple(QUERY))]
    plain = npt.evaluate(model, None, samples)
    with npt.transplanted(model, code.scaled(3), None, add=True):
        found = npt.evaluate(model, None, samples)
    assert found.student.kl != plain.student.kl and found.floor.kl == plain.floor.kl
    assert found.layers[1]["nmse_student"] != plain.layers[1]["nmse_student"]
    with (
        npt.transplanted(model, code, 3, add=True),
        pytest.raises(ModelError, match=r"position 3 .* npt.evaluate do not keep"),
    ):
        npt.evaluate(model, None, samples)
    assert npt.evaluate(model, None, samples).student.kl == plain.student.kl


def test_a_file_gives_back_the_code_and_its_record(model, code, tmp_path):
    code = npt.ContextCode(code.codes, {**code.record, "context": "zwölf: zwölfe\n"})
    code.save(tmp_path / "code.safetensors")
    again = npt.ContextCode.load(tmp_path / "code.safetensors")
    assert again.record == code.record and list(again.codes) == [1, 2]
    assert all(torch.equal(again.codes[i], code.codes[i]) for i in code.codes)
    assert list(tmp_path.iterdir()) == [tmp_path / "code.safetensors"]


GOOD = {"layers.1": torch.ones(8)}
HOSTILE = {
    "no record": (GOOD, None, "holds no code of a context: pass a file written by"),
    "no tensors": ({}, "{}", "holds no code of a context"),
    "not JSON": (GOOD, "{", "is damaged or unreadable"),
    "no object": (GOOD, "[]", "holds a list, not an object"),
    "NaN in the record": (GOOD, '{"scale": NaN}', "NaN is not JSON"),
    "deep": (GOOD, "[" * 100_000, "is damaged or unreadable"),
    "large": (GOOD, json.dumps({"context": "x" * (1 << 20)}), "more than the limit of 1,048,576"),
    "another name": ({**GOOD, "../layers.2": torch.ones(8)}, "{}", "extra tensor '../layers.2'"),
    "a large number": ({"layers.1000000": torch.ones(8)}, "{}", "extra tensor"),
    "two names": ({**GOOD, "layers.01": torch.ones(8)}, "{}", "extra tensor 'layers.01'"),
    "dtype": ({"layers.1": torch.ones(8).half()}, "{}", r"layers.1 is F16 \[8\], expected F32"),
    "shape": ({"layers.1": torch.ones(2, 4)}, "{}", r"layers.1 is F32 \[2, 4\], expected"),
    "empty": ({"layers.1": torch.ones(0)}, "{}", r"layers.1 is F32 \[0\], expected"),
    "infinite": ({"layers.1": torch.tensor([math.inf])}, "{}", "layers.1 is not finite"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_no_code_is_refused_in_one_line(tmp_path: Path, case: str):
    tensors, record, message = HOSTILE[case]
    path = tmp_path / "code.safetensors"
    safetensors.torch.save_file(tensors, path, None if record is None else {RECORD: record})
    with pytest.raises(DataError, match=message) as refused:
        npt.ContextCode.load(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64], ids=["missing", "empty", "noise"])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content):
    path = tmp_path / "code.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged or unreadable"):
        npt.ContextCode.load(path)


def test_what_cannot_be_is_refused(model, code, load_model):
    with pytest.raises(ConfigError, match="there are no queries"):
        npt.context_code(model, [])
    with pytest.raises(ConfigError, match=r"query 2 ends with token 70 .* and with token 17 alone"):
        npt.context_code(model, [(IDS, IDS), (QUERY, QUERY[:3])])
    with pytest.raises(ConfigError, match="outside 0 to 127"):
        npt.context_code(model, [([500, 9], [9])])
    with pytest.raises(ModelError, match="no NPT adapters"):
        npt.context_code(load_model(), [(IDS, IDS)])
    for factor in (math.nan, math.inf, 1e300):
        with pytest.raises(NumericalError, match=r"layers.1: the code is not finite"):
            code.scaled(factor)
    other = npt.ContextCode({1: code.codes[1]})
    with pytest.raises(ModelError, match="differ in layer 2: rank 8 and no code"):
        code + other
    with pytest.raises(ModelError, match="differ in layer 1: rank 4 and rank 8"):
        npt.ContextCode({1: torch.ones(4), 2: code.codes[2]}) + code
    with pytest.raises(ModelError, match="of two adapters"):
        code + npt.ContextCode(code.codes, {"adapter_hash": "0"})
    with (
        pytest.raises(ModelError, match="rank 8 for layer 1, the model has rank 4"),
        npt.transplanted(student(load_model, rank=4), code, 0, add=True),
    ):
        pass
    with (
        npt.transplanted(model, code, None, add=True),
        pytest.raises(ModelError, match="transplanted already"),
        npt.transplanted(model, code, 1, add=True),
    ):
        pass
    with (
        npt.transplanted(model, code, None, add=True),
        pytest.raises(ModelError, match="transplanted already"),
    ):
        npt.context_code(model, [(IDS, IDS)])
    assert all(layer.npt.recode is None for _, layer in npt_layers(model))
