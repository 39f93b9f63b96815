"""Specifications: what they become, in which order, and what is refused in one line before anything
runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.errors import ConfigError, NotSupportedError
from npt.presets import study_file
from npt.tools.sweep.lab import check_design
from npt.tools.sweep.settings import LEFT_OUT, Settings
from npt.tools.sweep.spec import _fingerprint, design_of, read_design

ROOT = Path(__file__).parents[3]
SHORT = {"max_steps": 4, "use_quantization": True}


def design(**parts: Any) -> Any:
    return design_of({"settings": SHORT, "parts": parts}, "study.yaml")


def test_a_grid_is_every_combination_once_with_each_seed() -> None:
    found = design(
        a={"grid": {"learning_rate": [1e-3, 1e-2], "adapter_rank": [2, 4]}, "seeds": [0, 7]}
    )
    got = [
        (t.settings.training.learning_rate, t.settings.adapter.rank, t.settings.training.seed)
        for t in found.trials
    ]
    assert got == [(lr, rank, seed) for lr in (1e-3, 1e-2) for rank in (2, 4) for seed in (0, 7)]
    assert found.varied == ("adapter_rank", "learning_rate")


def test_settings_may_be_given_by_their_other_names() -> None:
    other = design(
        a={"grid": {"lr": [1e-3, 1e-2]}},
        b={"random": {"count": 2, "seed": 1, "over": {"lr": {"low": 1e-3, "high": 1e-2}}}},
        c={"bisect": {"setting": "lr", "low": 0.01, "high": 1.0}},
    )
    own = design(
        a={"grid": {"learning_rate": [1e-3, 1e-2]}},
        b={
            "random": {
                "count": 2,
                "seed": 1,
                "over": {"learning_rate": {"low": 1e-3, "high": 1e-2}},
            }
        },
        c={"bisect": {"setting": "learning_rate", "low": 0.01, "high": 1.0}},
    )
    assert other == own
    with pytest.raises(ConfigError, match="grid: learning_rate is given twice; drop one"):
        design(a={"grid": {"lr": [1e-3], "learning_rate": [1e-2]}})


def test_arms_are_bundles_that_the_grid_is_laid_over() -> None:
    found = design(
        a={
            "arms": {"plain": {}, "safe": {"safe_mode": True}},
            "grid": {"learning_rate": [1e-3, 1e-2]},
        }
    )
    assert [(t.places[0].arm, t.settings.adapter.modulation) for t in found.trials] == [
        ("plain", "both"),
        ("plain", "both"),
        ("safe", "additive"),
        ("safe", "additive"),
    ]


def test_equal_settings_in_two_parts_are_one_trial_with_two_places() -> None:
    # 1e-3 is the default
    found = design(a={"grid": {"learning_rate": [1e-3, 1e-2]}}, b={"arms": {"default": {}}})
    assert len(found.trials) == 2
    assert [(p.part, p.arm) for p in found.trials[0].places] == [("a", ""), ("b", "default")]


def test_keys_are_the_same_in_every_process() -> None:
    one, other = (
        design(a={"grid": {"learning_rate": [rate]}}).trials[0].key for rate in (1e-3, 1e-2)
    )
    code = (
        "from npt.tools.sweep.spec import *; print(design_of({{'settings': {}, 'parts': {{'z':"
        " {{}}}}}}, 's.yaml').trials[0].key)"
    )
    command = [sys.executable, "-c", code.format({**SHORT, "learning_rate": 1e-3})]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        == one
        != other
    )
    assert design(b={"settings": {"learning_rate": 1e-3}}).trials[0].key == one


def test_a_key_does_not_depend_on_how_a_value_was_written() -> None:
    forms: list[dict[str, Any]] = [{"targets": "gate,up"}, {"targets": ["gate", "up"]}]
    assert len({design(a={"settings": form}).trials[0].key for form in forms}) == 1


@settings(deadline=None, max_examples=15)  # each example makes two designs
@given(st.integers(0, 2**31 - 1), st.integers(1, 6))
def test_draws_are_fixed_by_their_seed_and_lie_in_their_range(seed: int, count: int) -> None:
    over = {
        "learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
        "adapter_rank": {"low": 4, "high": 16},
        "loss": ["nmse", "mse"],
    }
    part = {"random": {"count": count, "seed": seed, "over": over}}
    found, again = design(a=part), design(a=part)
    assert [t.key for t in found.trials] == [t.key for t in again.trials]
    for trial in found.trials:
        assert (
            1e-4 <= trial.settings.training.learning_rate <= 1e-1
            and 4 <= trial.settings.adapter.rank <= 16
        )


def test_a_bisection_checks_both_ends_and_is_a_trial_of_its_own() -> None:
    found = design(
        a={"arms": {"x": {}}, "bisect": {"low": 1e-3, "high": 1, "rounds": 3}},
        b={"grid": {"learning_rate": [1e-3]}},
    )
    assert len(found.trials) == 2 and found.trials[0].bisect is not None
    assert found.trials[0].at(0.5).training.learning_rate == 0.5
    with pytest.raises(ConfigError, match="--learning_rate is inf"):
        design(a={"bisect": {"low": 1e-3, "high": float("inf")}})


def part(**content: Any) -> dict[str, Any]:
    return {"parts": {"a": content}}


MANY = list(range(1, 500))
BACKWARDS = {"learning_rate": {"low": 1, "high": 0.1}}
AT_ZERO = {"learning_rate": {"low": 0, "high": 1, "log": True}}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no parts": ({"parts": {}}, "has no parts"),
    "unknown entry": ({"part": {}}, "unknown entry 'part'"),
    "unknown setting": (
        part(grid={"learning_rat": [1]}),
        "no setting 'learning_rat'; did you mean learning_rate?",
    ),
    "unknown setting of all": (
        {"settings": {"adapter_rnk": 4}, **part()},
        "did you mean adapter_rank?",
    ),
    "wrong type": (part(grid={"adapter_rank": ["many"]}), "adapter_rank is 'many', expected int"),
    "value that cannot work": (
        part(grid={"learning_rate": [1e-3, -1.0]}),
        "learning_rate -1.0, seed 0: --learning_rate is",
    ),
    "combination that cannot work": (
        part(arms={"x": {"safe_mode": True, "mult_form": "unbounded"}}),
        "arm x, seed 0: --mult_form unbounded means nothing without",
    ),
    "arm with a semicolon": (part(arms={"a;b": {}}), "arm a;b is no name"),
    "arm without a name": (part(arms={"": {}}), "is no name"),
    "no list": (part(grid={"learning_rate": 1e-3}), "write a list of values"),
    "value twice": (part(grid={"learning_rate": [1e-3, "1e-3"]}), "has a value twice"),
    "setting of a folder": (
        part(settings={"output_dir": "x"}),
        "output_dir is no setting of a study",
    ),
    "seed among the settings": ({"settings": {"seed": 1}, **part()}, "write seeds: [0, 1] instead"),
    "seeds no list": ({"seeds": 3, **part()}, "seeds is 3"),
    "seed too large": ({"seeds": [2**31], **part()}, "seeds is"),
    "no length": ({"settings": {"max_steps": None}, **part()}, "--max_steps is unset"),
    "too many": (
        part(grid={"adapter_rank": MANY, "learning_rate": [i * 1e-6 for i in MANY]}),
        "249,001",
    ),
    "draws of nothing": (part(random={"count": 3}), "needs a count"),
    "range backwards": (part(random={"count": 3, "over": BACKWARDS}), "low and high"),
    "range at zero": (part(random={"count": 1, "over": AT_ZERO}), "a range above 0"),
    "infinite whole number": (
        part(settings={"adapter_rank": float("inf")}),
        "adapter_rank is inf, expected int",
    ),
    "infinite end of a range": (
        part(random={"count": 1, "over": {"adapter_rank": {"low": 1, "high": float("inf")}}}),
        "expected int",
    ),
    "bisection of a list": (
        part(bisect={"setting": ["learning_rate"], "low": 1e-3, "high": 1.0}),
        "write the name of one setting",
    ),
    "no name": ({"name": "", **part()}, "which no folder can be called"),
    "name of a folder elsewhere": ({"name": "../x", **part()}, "name is '../x'"),
    "name of the folder above": ({"name": "..", **part()}, "name is '..'"),
    "name of several lines": ({"name": "a\nb", **part()}, "which no folder can be called"),
    "name too long": ({"name": "a" * 201, **part()}, "name has 201 letters"),
    "fault that its teacher would miss": (
        part(settings={"fault_step": 2, "teacher_precision": "fp32"}),
        "--fault_step does not go with --teacher_precision",
    ),
    "memory": (part(settings={"max_memory": "1GiB"}), "max_memory is no setting of a study"),
    "share of refusals": (
        part(settings={"rank_timeout": 0.5}),
        "rank_timeout is no setting of a study",
    ),
    "bisection of a word": (
        part(bisect={"setting": "loss", "low": "nmse", "high": "mse"}),
        "write a setting that is a number",
    ),
    "fault after the end": (part(settings={"fault_step": 4}), "--fault_step is 4 of 4 steps"),
    "fault of no step": (
        part(settings={"fault_scale": 10.0}),
        "means nothing without --fault_step",
    ),
    "two number formats": (
        part(settings={"use_quantization": False, "use_fp16": True, "compute_dtype": "bf16"}),
        "drop one of the two",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_in_one_line_that_names_it(case: str) -> None:
    content, said = REFUSED[case]
    content = {**content, "settings": {**SHORT, **content.get("settings", {})}}
    with pytest.raises(ConfigError) as caught:
        design_of(content, "study.yaml")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"), [("[1, 2]", "is a list"), ("a: [", "is not valid YAML"), ("", "has no parts")]
)
def test_a_file_that_is_no_specification_is_refused(tmp_path, text: str, said: str) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_design(str(path))


def test_a_closed_form_start_without_the_stream_is_refused() -> None:
    found = design(a={"settings": {"init": "calibrated", "targets": "gate,up,down"}})
    with pytest.raises(NotSupportedError, match=r"part a: --init calibrated .* add stream"):
        check_design(found)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        read_design("nowhere.yaml")


def test_a_changed_default_makes_another_trial() -> None:
    resolved = Settings.of({**SHORT, "compute_dtype": "fp16"}, seed=3)
    values = resolved.values()
    assert (
        values["adapter_rank"] == 16
        and values["seed"] == 3
        and not values.keys() & (LEFT_OUT.keys() - {"seed"})
    )
    assert _fingerprint(values) != _fingerprint({**values, "adapter_rank": 8})


def test_the_study_of_make_stability_has_its_hundred_runs() -> None:
    found = read_design(str(study_file("stability")))
    assert len(found.trials) >= 100
    forms = {trial.settings.adapter.mult_form for trial in found.trials}
    assert forms == {"sigmoid", "half_sigmoid", "one_plus_tanh", "unbounded"}
    assert {trial.settings.probe.compute_dtype for trial in found.trials} >= {None, "bf16", "fp16"}


def test_the_file_that_the_guide_prints_is_a_study(tmp_path) -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "studies.md"
    _, printed, _ = re.split(r"^```(?:yaml)?\n", page.read_text(encoding="utf-8"), flags=re.M)
    file = tmp_path / "rates.yaml"
    file.write_text(printed, encoding="utf-8")
    assert list(read_design(str(file)).parts) == ["map", "draws", "edge"]
