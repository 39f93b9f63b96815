"""Where in a text each number of a code is largest."""

from typing import Any

import pytest
import torch
from students import moved

import npt
from npt.adapters.converted import npt_layers
from npt.batch import Sample
from npt.evaluation.contexts import PASSAGES, Number, passages_of
from npt.evaluation.modulation_map import modulation_map


@pytest.fixture
def student(load_model: Any) -> Any:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=8, active=3, token_rank=4, layers="1,3"))
    moved(model, 0.3)
    with torch.no_grad():
        npt_layers(model)[0][1].npt.log_tau.fill_(1.0)
    return model


SAMPLES = [
    Sample(f"s{i}", tuple(3 + (5 * i + 7 * k * k) % 120 for k in range(6 + i))) for i in range(7)
]


def test_the_passages_are_those_of_each_sample_by_itself(student: Any) -> None:
    numbers = [Number(1, 2, 1), Number(3, 5, -1)]
    found = passages_of(student, SAMPLES, numbers, batch_size=3)
    for number in numbers:
        expected = []
        for sample in SAMPLES:
            code = modulation_map(student, list(sample.input_ids)).codes[number.layer][
                :, number.row
            ]
            size, at = (number.sign * code).max(dim=0)
            if size > 0:
                expected.append((float(size), sample.input_ids[: int(at) + 1]))
        expected.sort(reverse=True)
        assert [p.ids for p in found[number]] == [ids for _, ids in expected[:PASSAGES]]
        values = [number.sign * size for size, _ in expected[:PASSAGES]]
        # padding changes the order of sums
        assert [p.value for p in found[number]] == pytest.approx(values, rel=1e-4)


def test_a_maps_active_numbers_are_its_codes_and_the_strongest_come_first(student: Any) -> None:
    found = modulation_map(student, list(SAMPLES[3].input_ids))
    codes = npt.modulation_of(student, list(SAMPLES[3].input_ids), -1).codes
    for code, pairs in zip(codes.values(), found.active_numbers(8), strict=True):
        assert len(pairs) == int(code.count_nonzero()) < 8
        assert [abs(value) for _, value in pairs] == sorted(
            (float(f"{abs(float(code[int(i)])):.3g}") for i, _ in pairs), reverse=True
        )
    strongest = found.strongest(4)
    assert len(strongest) == 4
    for number, at, value in strongest:
        assert float(found.codes[number.layer][at, number.row]) == value and value * number.sign > 0


def test_the_plain_form_has_no_active_numbers(load_model: Any) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=4, layers="1,3"))
    found = modulation_map(model, [3, 4, 5])
    assert found.codes == {} and found.strongest(3) == []
