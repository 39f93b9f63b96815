"""What a run's page says at its top, and how a run that gave up is told: steps, shares and what was
not finite.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import Reader, event, fidelity, make_run, metrics, modulation, refusal
from rich.console import Console

from npt.evaluation.evaluate import Fidelity
from npt.evaluation.metrics import Figures
from npt.evaluation.table import print_fidelity
from npt.report import charts
from npt.report.page import page, summary
from npt.report.run import read_run

pytestmark = pytest.mark.usefixtures("plain_charts")


def read(folder: Path) -> Reader:
    return Reader(page(read_run(folder), folder / "report.html"))


def gave_up(folder: Path) -> Path:
    """A run of 20 steps that logs every fourth and made nine, with nothing finite in its adapters'
    look.
    """
    lines = [
        event("start", total_steps=20),
        *(refusal(10) for _ in range(3)),
        event("stopped", step=9, reason="3 refusals in a row"),
    ]
    spoilt = modulation(
        9,
        counts=[0] * 40,
        saturated=0.0,
        bad=1.0,
        mean=None,
        std=None,
        add_rms=None,
        product_rms=None,
    )
    for layer in spoilt["layers"].values():
        layer["stream_rms"] = None
    return make_run(
        folder,
        events=lines,
        metrics=[metrics(step) for step in (1, 4, 8)],
        fidelity=None,
        modulation=spoilt,
    )


def test_a_run_that_gave_up_names_its_step_and_that_of_its_figures(tmp_path) -> None:
    folder = gave_up(tmp_path / "run")
    reader = read(folder)
    assert "Stopped in step 10, after 9 that were made: 3 refusals in a row" in reader.text
    assert "steps9 of 20" in reader.text.replace("\n", "")
    assert (
        "tokens, logged at step 8512" in reader.text
        and "last loss, logged at step 8" in reader.text
    )
    found = summary(read_run(folder))
    assert (found["step"], found["refused_in_step"], found["total_steps"]) == (9, 10, 20)
    assert "after 9stopped" in reader.sections["events"]


def test_without_finite_multipliers_no_share_is_at_their_bounds(tmp_path) -> None:
    said = read(gave_up(tmp_path / "run")).sections["modulation"]
    assert "1e+02" not in said and "0.00%" not in said and "At their bounds are" not in said
    assert "Multipliers are not finite in 9 of 9 places: the most 100.0% of them" in said
    assert said.count("none finite") == 9 and "–" not in said


def test_no_layer_is_drawn_at_steps_that_were_never_made(tmp_path, monkeypatch) -> None:
    drawn = []
    paint = charts.paint_heat
    monkeypatch.setattr(
        charts,
        "paint_heat",
        lambda axes, cells, *more: drawn.append(cells) or paint(axes, cells, *more),
    )
    read(gave_up(tmp_path / "run"))
    (cells,) = drawn
    # of ten columns: nothing is known of the steps 9 and 10, and a value holds until the next one
    assert np.isfinite(cells[:, :8]).all() and np.isnan(cells[:, 8:]).all() and cells.shape[1] == 10
    assert (cells[:, 0] == cells[:, 2]).all() and (cells[:, 3] == cells[:, 6]).all()


def test_the_head_says_what_the_run_was_made_of(tmp_path) -> None:
    settings = {
        "model_name": "tiny", "rank": 16, "targets": ["gate", "up"], "modulation": "both", "init":
        "calibrated", "additive_scale": 1.0, "mult_bound": 0.5, "strategy": "end_to_end", "loss":
        "nmse", "learning_rate": 3e-4, "batch_size": 4, "processes": 1,
        "gradient_accumulation_steps": 2, "dataset_name": "builtin", "max_length": 256,
        "use_quantization": True, "run_name": "one",
    }  # fmt: skip
    run = {
        "settings": settings, "layers": [4, 5, 6, 9], "seed": 7, "base_hash": "1c8e85f57d0448e3" *
        4, "device": "cpu", "trainable_parameters": 503808, "precision": {"quantization": "nf4"},
        "versions": {"npt": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip
    reader = read(make_run(tmp_path / "run", run=run))
    (head,) = [text for name, text in reader.sections.items() if not name]
    for line in (
        "basetiny, hash 1c8e85f57d04, NF4, on cpu",
        "adapterslayers 4-6, 9 (4), rank 16, targets gate up, modulation both, 503,808 parameters",
        "startcalibrated, alpha 1, beta 0.5",
        "trainingend_to_end, loss nmse, rate 0.0003, batch 4 x 2, 12 of 12 steps, seed 7",
        "databuiltin, up to 256 tokens each",
        "versionsnpt 0.1.0, torch 2.13.0",
    ):
        assert line in head


@pytest.mark.parametrize(
    "run",
    [None, {}, {"settings": 3, "layers": {}, "versions": [1], "precision": "x", "base_hash": 4}],
)
def test_a_head_of_a_run_that_says_little_says_little(tmp_path, run) -> None:
    assert "None" not in read(make_run(tmp_path / "run", run=run)).sections[""]


def test_page_and_console_write_a_figure_alike_json_the_fraction(tmp_path) -> None:
    found = fidelity()
    student: dict[str, Any] = {
        **found["student"],
        "kl": 0.00622,
        "kl_se": 0.00025,
        "acceptance": 0.9661,
        "acceptance_se": 0.0013,
    }
    found["student"] = student
    reader = read(make_run(tmp_path / "run", fidelity=found))
    models = {
        name: Figures.from_dict(values)
        for name, values in found.items()
        if name in ("teacher", "floor", "initial", "student")
    }
    stream = io.StringIO()
    measured = Fidelity(
        models["teacher"],
        models["floor"],
        models["student"],
        models["initial"],
        {},
        {},
        10,
        None,
        {},
    )
    print_fidelity(measured, Console(file=stream, width=160))
    for written in ("0.0062 ± 0.0003", "96.6 ± 0.1%"):
        assert written in reader.sections["fidelity"] and written in stream.getvalue()
    assert "0.966" not in reader.sections["fidelity"]
    said = json.loads(json.dumps(summary(read_run(tmp_path / "run"))))
    assert (said["acceptance"], said["acceptance_se"]) == (0.9661, 0.0013)
    assert all(0 <= said[key] <= 1 for key in ("top1", "acceptance"))
