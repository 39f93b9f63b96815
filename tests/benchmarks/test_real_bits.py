"""The bits of rounded codes, against numbers whose entropy and bound are known."""

import math

import pytest
import torch

import npt
import real_bits
from npt.adapters.converted import npt_layers
from npt.batch import Sample
from real_bits import count_bits, rounded_codes

IDS = tuple(range(3, 40))


@pytest.fixture
def student(load_model):
    model = load_model()
    form = {"rank": 6, "layers": "1,3", "targets": ("stream",), "token_rank": 2}
    npt.attach(model, npt.NPTConfig(**form))
    for _, layer in npt_layers(model):
        layer.npt.scale.fill_(100.0)
    return model


def test_codes_are_multiples_of_the_step_inside_and_plain_afterwards(student):
    layer = npt_layers(student)[0][1]
    inputs = torch.randn(1, 9, student.config.hidden_size)
    plain = layer.npt.code(inputs)
    with rounded_codes(student, 0.5) as seen:
        rounded = layer.npt.code(inputs)
    ((z, multiples),) = seen[1]
    assert torch.equal(rounded[0], 0.5 * multiples) and torch.equal(z, plain[0])
    assert torch.equal(multiples, multiples.round()) and multiples.count_nonzero() > 0
    # a number is rounded away from 0 from 0.6 of a step on
    assert (z - rounded[0]).abs().max() < 0.6 * 0.5 and (z.abs() < 0.6 * 0.5)[multiples == 0].all()
    assert torch.equal(layer.npt.code(inputs), plain)


def test_bits_are_by_layer_and_fewer_for_a_larger_step(student):
    samples = [Sample("a", IDS, IDS), Sample("b", IDS[::-1], IDS[::-1])]
    fine, coarse = (count_bits(student, samples, samples, step) for step in (0.05, 0.5))
    assert fine["bits"] > coarse["bits"] > 0 and fine["bits_bound"] > coarse["bits_bound"]
    assert list(fine["bits_by_layer"]) == [1, 3]
    assert fine["bits"] == pytest.approx(sum(fine["bits_by_layer"].values()) / 2)


def test_the_cost_is_the_entropy_and_more_with_histograms_of_other_numbers():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-1, 3, (8000, 5), generator=generator)  # four values: two bits
    # 3 values more than each histogram's counts say cost little in 8,000
    assert real_bits._cost(codes, codes) == pytest.approx(5 * 2.0, rel=2e-3)
    assert real_bits._cost(codes.clamp_max(0), codes) > 5 * 2.0 + 1
    assert real_bits._cost(0 * codes, 0 * codes) == pytest.approx(0.0, abs=1e-4)


def test_the_bound_is_that_of_gaussian_numbers():
    # both above the level 0.5: log2(sqrt(8 / 0.5)) + log2(sqrt(2 / 0.5)); then one below
    assert real_bits._least_bits(torch.tensor([8.0, 2.0]), 1.0) == pytest.approx(2 + 1, rel=1e-6)
    assert real_bits._least_bits(torch.tensor([8.0, 0.25]), 0.75) == pytest.approx(2.0, rel=1e-6)
    assert real_bits._least_bits(torch.tensor([8.0, 2.0]), 10.0) == pytest.approx(0.0, abs=1e-6)
    assert math.isfinite(real_bits._least_bits(torch.tensor([8.0]), 8e-9))
