"""The study of widths: a wider model is the same one, in 4 bit too."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import npt
from npt.cli.sweep import check_design
from npt.tools.sweep.spec import design_of


@pytest.fixture(scope="module")
def widths():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
        yield importlib.import_module("widths")


@pytest.fixture(scope="module")
def bases(widths, tmp_path_factory):
    return widths.write_bases(tmp_path_factory.mktemp("bases"), (1, 2))


# Sums over twice as many terms are rounded in another order: 2e-5 measured. NF4 keeps each block's
# scale in 8 bits, 256 blocks of a matrix at a time, which fall otherwise: 0.065 measured, where NF4
# itself changes these logits by up to 1.7.
@pytest.mark.parametrize(("quantization", "tolerance"), [(None, 2e-4), ("nf4", 0.15)])
def test_a_wider_model_gives_the_same_logits(bases, quantization, tolerance) -> None:
    ids = torch.randint(0, 2048, (2, 48), generator=torch.Generator().manual_seed(0))
    narrow, wide = (
        npt.load_base(str(bases[k]), quantization=quantization, device="cpu")[0] for k in (1, 2)
    )
    assert wide.config.hidden_size == 384 and wide.config.intermediate_size == 1024
    with torch.no_grad():
        a, b = narrow(ids).logits, wide(ids).logits
    assert a.std() > 1 and (a - b).abs().max() < tolerance


def test_the_study_of_widths_can_start_and_seeks_a_limit_for_each(widths, bases) -> None:
    design = design_of(widths.specification(bases), "widths.yaml")
    check_design(design)
    sought = [trial for trial in design.trials if trial.bisect is not None]
    assert len(sought) == 6 and len(design.trials) == 6 + 2 * len(widths.RATES)
