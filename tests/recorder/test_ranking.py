"""The notable tensors of a record: non-finite ones first, then explosions before anything
overflows, then gradients.
"""

from typing import Any

import pytest
import torch
from torch import nn

import npt
from npt.batch import Batch, Sample, collate
from npt.recorder.ranking import FACTOR, explosions, gradients, growths, worst, worst_rows
from npt.recorder.record import Record, Row
from npt.recorder.recorder import Recorder

TEXT = (
    "import os\n\n\nclass Stack:\n    def __init__(self, items):\n        self.items ="
    " list(items)\n"
)


def row(module: str = "m", stage: str = "out", rms: float | None = 1.0, **more: Any) -> Row:
    fields: dict[str, Any] = {"layer": None, "direction": "forward", "shape": (4,), "count": 4}
    fields |= {"dtype": "float32", "finite_share": 1.0, "nan": 0, "pos_inf": 0, "neg_inf": 0}
    fields |= dict.fromkeys(("min", "max", "mean", "std", "absmax"), rms)
    return Row(module=module, stage=stage, rms=rms, **{**fields, **more})


def grown(*sizes: tuple[str, float | None, float | None]) -> Record:
    """A record of (module, RMS in, RMS out)."""
    rows: list[Row] = []
    for module, before, after in sizes:
        rows.append(row(module, "in", before))
        rows.append(row(module, "out", after, source=len(rows) - 1))
    return Record(1, tuple(rows))


def test_what_grew_beyond_the_factor_is_ranked_by_its_growth() -> None:
    record = grown(("a", 1.0, 2000.0), ("b", 0.5, 499.0), ("c", 1.0, 1e6), ("d", 3.0, 0.1))
    found = [(e.after.module, e.before.stage, e.growth) for e in explosions(record)]
    assert found == [("c", "in", 1e6), ("a", "in", 2000.0)]
    assert [e.after.module for e in explosions(record, factor=500)] == ["c", "a", "b"]
    assert [e.after.module for e in growths(record)] == ["c", "a", "b", "d"]
    assert str(explosions(record)[0]) == "c out has RMS 1e+06, 1e+06 times that of c in"


@pytest.mark.parametrize("sizes", [(0.0, 5.0), (None, 5.0), (1.0, None), (1e-9, 0.9)])
def test_growth_from_nothing_or_to_little_is_no_explosion(sizes) -> None:
    assert explosions(grown(("a", *sizes))) == []


def test_a_module_that_repeats_what_happened_inside_it_is_left_out() -> None:
    record = grown(
        ("m.layers.1.mlp.down", 1.0, 2e3),
        ("m.layers.1.mlp", 1.0, 3e3),
        ("m.layers.1", 1.0, 4e3),
        ("m.layers.11", 1.0, 5e3),
    )
    assert [e.after.module for e in explosions(record)] == ["m.layers.11", "m.layers.1.mlp.down"]
    assert [e.after.module for e in explosions(grown(("a", 1.0, 2e3), ("", 1.0, 9e3)))] == ["a"]


def test_gradients_rank_by_norm_after_those_that_are_not_finite() -> None:
    record = Record(
        1,
        (
            row("forward", rms=9e9),
            row("small", rms=0.1, direction="gradient"),
            row("bad", rms=0.2, direction="gradient", nan=1),
            row("none", rms=None, direction="gradient", count=0),
            row("large", rms=7.0, direction="gradient"),
            row("all bad", rms=None, direction="gradient", nan=4),
        ),
    )
    assert [r.module for r in gradients(record)] == ["bad", "all bad", "large", "small", "none"]


def test_the_worst_is_a_bad_number_then_an_explosion_then_a_gradient() -> None:
    clean = grown(("a", 1.0, 2.0))
    assert worst(clean) == "all 2 tensors finite, none exploded"
    gradient = row("g", "weight", 3.0, direction="gradient")
    found = worst(Record(1, (*clean.rows, gradient)))
    assert found == "all 3 tensors finite, none exploded, largest gradient norm 6 of g weight"
    exploded = grown(("a", 1.0, 5000.0), ("b", 1.0, 4000.0))
    found = worst(Record(1, (*exploded.rows, gradient)))
    assert found == "explosion: a out has RMS 5e+03, 5e+03 times that of a in (2 in all)"
    bad = row("g", "weight", None, direction="gradient", nan=1, pos_inf=2, neg_inf=1)
    found = worst(Record(1, (*exploded.rows, bad, row(nan=4, rms=None))))
    assert found.startswith("2 of 6 tensors are not finite; the first is gradient of g weight")
    assert found.endswith(" (1 NaN, 2 +Inf, 1 -Inf of 4)")
    assert worst(Record(1, ())) == "no tensor was recorded"


# --- on the embedded model


def tiny(quantization: str | None = "nf4", **arguments: Any) -> tuple[nn.Module, Batch]:
    model, tokenizer = npt.load_base("tiny", quantization=quantization, device="cpu", **arguments)
    return model, collate([Sample("0", tuple(tokenizer(TEXT)["input_ids"]))], 0)


def forward(model: nn.Module, batch: Batch) -> Record:
    with Recorder(model) as recorder, torch.no_grad():
        model(batch.input_ids)
    return recorder.record()


def test_the_clean_embedded_model_has_no_explosion() -> None:
    record = forward(*tiny())
    assert explosions(record) == [] and record.bad == []
    # The first layer writes into a small stream: that is far more than any other module does, and
    # far below what counts.
    largest, second = growths(record)[:2]
    assert largest.after.name == "model.layers.0 out" and 20 < largest.growth < FACTOR / 5
    assert second.growth < FACTOR / 50


def test_an_explosion_is_seen_before_fp16_overflows() -> None:
    model, batch = tiny(None, use_fp16=True)
    warned = overflowed = None
    for growth in range(1, 20):
        with torch.no_grad():
            model.model.layers[4].mlp.down_proj.weight.mul_(8)
        record = forward(model, batch)
        if record.bad:
            overflowed = growth
            break
        if warned is None and explosions(record):
            warned = growth
            assert explosions(record)[0].after.name == "model.layers.4.mlp.down_proj out"
    assert warned is not None and overflowed is not None and warned < overflowed


def test_the_worst_tensors_come_in_the_order_of_their_urgency() -> None:
    record = Record(
        1,
        (
            row("small", rms=1.0),
            row("half", rms=3e4, dtype="float16"),
            row("large", rms=3e5),
            row("ids", rms=9e9, dtype="int64"),
            row("before", rms=2.0),
            row("exploded", rms=5e3, source=4),
            row("nan", rms=None, nan=4),
            row("input", "in", rms=8e5),
            row("large.again", rms=3e5),
        ),
    )
    names = [each.module for each in worst_rows(record)]
    assert names == ["nan", "exploded", "half", "large", "before", "small"]
    assert [each.module for each in worst_rows(record, most=1)] == ["nan"]
    assert worst_rows(Record(1, ())) == []


def test_a_row_is_a_line() -> None:
    assert str(row("m", rms=2.0)) == "m out: float32 [4], 2 to 2, mean 2, deviation 2, RMS 2"
    gradient = row("m", "weight", None, direction="gradient", nan=3, pos_inf=1, count=4)
    assert str(gradient) == "gradient of m weight: float32 [4], 3 NaN, 1 +Inf, 0 -Inf of 4"
