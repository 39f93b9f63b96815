"""Specifications: what they become, in which order, and what is refused in one line before anything
runs.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.cli.sweep import check_design
from npt.errors import ConfigError, NotSupportedError
from npt.presets import study_file
from npt.tools.sweep.spec import LEFT_OUT, design_of, read_design, values_of
from npt.train.resolve import resolve

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
    assert found.varied == ("adapter_rank", "token_rank", "learning_rate")


def test_settings_may_be_given_by_their_other_names() -> None:
    def named(rate: str) -> Any:
        over = {rate: {"low": 1e-3, "high": 1e-2}}
        return design(
            a={"grid": {rate: [1e-3, 1e-2]}},
            b={"random": {"count": 2, "seed": 1, "over": over}},
            c={"bisect": {"setting": rate, "low": 0.01, "high": 1.0}},
        )

    assert named("lr") == named("learning_rate")
    with pytest.raises(
        ConfigError, match="grid: lr is given twice, once as learning_rate: remove one"
    ):
        design(a={"grid": {"lr": [1e-3], "learning_rate": [1e-2]}})


def test_arms_are_bundles_that_the_grid_is_laid_over() -> None:
    found = design(
        a={
            "arms": {"plain": {}, "safe": {"safe_mode": True}},
            "grid": {"learning_rate": [1e-3, 1e-2]},
        }
    )
    assert [(t.origins[0].arm, t.settings.adapter.modulation) for t in found.trials] == [
        ("plain", "both"),
        ("plain", "both"),
        ("safe", "additive"),
        ("safe", "additive"),
    ]


def test_equal_settings_in_two_parts_are_one_trial_of_two_origins() -> None:
    # 5e-5 is the default of a closed-form start
    found = design(a={"grid": {"learning_rate": [5e-5, 1e-2]}}, b={"arms": {"default": {}}})
    assert len(found.trials) == 2
    assert [(p.part, p.arm) for p in found.trials[0].origins] == [("a", ""), ("b", "default")]


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
        "loss": ["nmse", "direction"],
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


# a row is YAML in braces, and words of the refusal
REFUSED = r"""
parts: {} => has no parts
part: {} => unknown entry 'part'
parts: {a: {grid: {learning_rat: [1]}}} => no setting 'learning_rat': did you mean learning_rate?
settings: {adapter_rnk: 4}, parts: {a: {}} => did you mean adapter_rank?
parts: {a: {grid: {adapter_rank: [many]}}} => adapter_rank is 'many'; expected int
parts: {a: {grid: {learning_rate: [0.001, -1.0]}}} => learning_rate -1.0, seed 0: --learning_rate is
parts: {a: {arms: {x: {safe_mode: true, mult_form: unbounded}}}} => arm x, seed 0: --mult_form
parts: {a: {arms: {a;b: {}}}} => arm a;b: the table cannot
parts: {a: {arms: {? '' : {}}}} => the table cannot hold this name
parts: {a: {grid: {learning_rate: 0.001}}} => write a list of values
parts: {a: {grid: {learning_rate: [0.001, 1e-3]}}} => lists a value twice
parts: {a: {settings: {output_dir: x}}} => a study does not accept output_dir
settings: {seed: 1}, parts: {a: {}} => write seeds: [0, 1] instead
seeds: 3, parts: {a: {}} => seeds is 3
seeds: [2147483648], parts: {a: {}} => seeds is
parts: {a: {random: {count: 3}}} => needs count
parts: {a: {random: {count: 1000000000000, over: {lr: [1]}}}} => needs count (1 to 100,000)
parts: {a: {random: {count: 3, over: {lr: {low: 1, high: 0.1}}}}} => a: random: learning_rate is
parts: {a: {random: {count: 3, over: [lr]}}} => a: random: over is a list; write a mapping
parts: {a: {random: {count: 1, over: {lr: {low: 0, high: 1, log: true}}}}} => both above 0
parts: {a: {settings: {adapter_rank: .inf}}} => adapter_rank is inf; expected int
parts: {a: {random: {count: 1, over: {adapter_rank: {low: 1, high: .inf}}}}} => expected int
parts: {a: {bisect: {setting: [learning_rate], low: 0.001, high: 1.0}}} => there is no setting
name: '', parts: {a: {}} => cannot be a folder name
name: ../x, parts: {a: {}} => name '../x' cannot
name: .., parts: {a: {}} => name '..' cannot
name: "a\nb", parts: {a: {}} => cannot be a folder name
parts: {a: {bisect: {setting: loss, low: nmse, high: direction}}} => write a setting that is
"""
ROWS = dict(line.split(" => ") for line in REFUSED.strip().splitlines())


@pytest.mark.parametrize("written", ROWS)
def test_what_cannot_work_is_refused_in_one_line_that_names_it(written: str) -> None:
    content = yaml.safe_load(f"{{{written}}}")
    content = {**content, "settings": {**SHORT, **content.get("settings", {})}}
    with pytest.raises(ConfigError) as caught:
        design_of(content, "study.yaml")
    assert ROWS[written] in str(caught.value) and "\n" not in str(caught.value)


def test_a_slip_in_a_grid_is_no_million_trials() -> None:
    many = list(range(1, 500))
    with pytest.raises(ConfigError, match="part a has 249,001 trials, more than 100,000: shorten"):
        design(a={"grid": {"adapter_rank": many, "learning_rate": [i * 1e-6 for i in many]}})


def test_a_name_is_not_endless() -> None:
    with pytest.raises(ConfigError, match="use up to 200"):
        design_of({"name": "a" * 201, "parts": {"a": {}}}, "study.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "is a list"),
        ("a: [", "is not valid YAML"),
        ("", "has no parts"),
        ("parts: {a: &a {}, b: *a}", r"\*a is an alias"),
        ("parts: {[a, b]: {}}", "a key is a list or a mapping"),
    ],
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


def test_settings_have_their_defaults_and_none_of_a_folder() -> None:
    values = values_of(resolve({**SHORT, "compute_dtype": "bf16", "seed": 3}, of_study=True))
    assert (values["adapter_rank"], values["compute_dtype"], values["seed"]) == (192, "bf16", 3)
    assert not values.keys() & (LEFT_OUT.keys() - {"seed"})


def test_the_study_of_make_stability_has_its_hundred_runs() -> None:
    found = read_design(str(study_file("stability")))
    assert len(found.trials) >= 100
    forms = {trial.settings.adapter.mult_form for trial in found.trials}
    assert forms == {"sigmoid", "half_sigmoid", "one_plus_tanh", "unbounded"}
    assert {trial.settings.base.compute_dtype for trial in found.trials} == {"fp32", "bf16"}


def test_the_file_that_the_guide_prints_is_a_study(tmp_path) -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "studies.md"
    _, printed, _ = re.split(r"^```(?:yaml)?\n", page.read_text(encoding="utf-8"), flags=re.M)
    file = tmp_path / "rates.yaml"
    file.write_text(printed, encoding="utf-8")
    assert list(read_design(str(file)).parts) == ["map", "draws", "edge"]
