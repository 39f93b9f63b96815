"""Unquantised to 4-bit to NPT: the same figures whether the unquantised base is at hand or only
its kept outputs.
"""

import pytest
import torch
from students import enlarge, moved, random_samples

import npt
from npt.batch import Sample
from npt.config import NPTConfig
from npt.errors import DataError
from npt.evaluation.evaluate import evaluate, reference_outputs


def samples() -> list[Sample]:
    some = random_samples((9, 4, 12, 7, 2))
    # One with a prompt, and one in which nothing is predicted.
    return [*some, Sample("p", (5, 6, 7, 8), (-100, -100, 7, 8)), Sample("n", (5, 6), (-100, -100))]


@pytest.fixture(scope="module")
def student(load_model):
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return moved(model, 0.2)


@pytest.fixture(scope="module")
def base(load_model):
    return load_model(None)


def test_the_three_comparisons_by_hand(student, base, tokenizer) -> None:
    quantized = student  # in mode teacher
    sums = {"unquantized_to_4bit": 0.0, "4bit_to_npt": 0.0, "unquantized_to_npt": 0.0}
    tokens = 0
    for sample in samples():
        ids = torch.tensor([sample.input_ids])
        with torch.no_grad():
            of_base = base(input_ids=ids).logits[0].double().log_softmax(-1)
            of_npt = student(input_ids=ids).logits[0].double().log_softmax(-1)
            with npt.adapters_disabled(quantized):
                of_4bit = quantized(input_ids=ids).logits[0].double().log_softmax(-1)
        labels = sample.labels or sample.input_ids
        for t in [i - 1 for i in range(1, len(labels)) if labels[i] != -100]:
            for name, p, q in (
                ("unquantized_to_4bit", of_base, of_4bit),
                ("4bit_to_npt", of_4bit, of_npt),
                ("unquantized_to_npt", of_base, of_npt),
            ):
                sums[name] += float((p[t].exp() * (p[t] - q[t])).sum())
            tokens += 1
    found = evaluate(student, tokenizer, samples(), unquantized=base).attribution
    assert found.keys() == sums.keys()
    for name, total in sums.items():
        assert found[name].tokens == tokens
        # fp32 logits of padded rows against fp64
        assert found[name].kl == pytest.approx(total / tokens, rel=1e-4)
        assert found[name].kl > 1e-3  # the comparison is of something


def test_attribution_changes_no_other_figure(student, base, tokenizer) -> None:
    with_it, without = (
        evaluate(student, tokenizer, samples(), unquantized=base),
        evaluate(student, tokenizer, samples()),
    )
    assert with_it.attribution["4bit_to_npt"] == with_it.student == without.student
    assert (with_it.teacher, with_it.floor, with_it.layers) == (
        without.teacher,
        without.floor,
        without.layers,
    )
    assert not without.attribution


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_reference_of_which_the_model_is_gone_gives_the_same(
    student, load_model, base, tokenizer, batch_size
) -> None:
    alone = load_model(None)
    reference = reference_outputs(alone, samples(), batch_size=3)
    del alone
    found = evaluate(
        student, tokenizer, samples(), unquantized=reference, batch_size=batch_size
    ).attribution
    beside = evaluate(student, tokenizer, samples(), unquantized=base, batch_size=3).attribution
    for name, figures in beside.items():
        # rows are padded to other lengths
        assert found[name].as_dict() == pytest.approx(figures.as_dict(), rel=1e-4)


def test_the_base_is_left_as_it_was(student, load_model, tokenizer) -> None:
    base = load_model(None).train()
    npt.attach(base, NPTConfig(rank=4, layers="1"))
    enlarge(base, b=1000)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    with_adapters = evaluate(student, tokenizer, samples(), unquantized=base).attribution
    assert base.training and base.model.layers[1].npt.mode == "student"
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    npt.detach(base)
    # its teacher is what counts
    assert evaluate(student, tokenizer, samples(), unquantized=base).attribution == with_adapters


def test_a_reference_of_other_samples_is_refused(student, base, tokenizer) -> None:
    reference = reference_outputs(base, samples()[:3])
    with pytest.raises(DataError, match="on the same samples"):
        evaluate(student, tokenizer, samples(), unquantized=reference)
    with pytest.raises(DataError, match=r"999.*sample there"):
        reference_outputs(base, [Sample("there", (5, 999))])
