"""Presets: settings by name that ship with the package, sound, and told apart from files."""

from __future__ import annotations

import pytest

from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError
from npt.flags import build, read_yaml, with_safe_mode
from npt.presets import about, presets, settings_file

CLASSES = (BaseConfig, NPTConfig, DataConfig, TrainConfig)


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_settings_that_work_together_and_says_what_it_is(name):
    given = with_safe_mode(read_yaml(name, CLASSES, {"safe_mode": bool}))
    for cls in CLASSES:
        build(cls, given)
    assert len(about(presets()[name])) > 80


def test_the_seed_has_the_values_of_the_write_ups():
    given = with_safe_mode(read_yaml("seed", CLASSES, {"safe_mode": bool}))
    expected = {"learning_rate": 5e-5, "modulation": "additive", "adapter_rank": 16, "additive_scale": 0.1, "init": "random"}
    assert {name: given[name] for name in expected} == expected


def test_a_file_of_that_name_goes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings_file("tiny") == presets()["tiny"]
    (tmp_path / "tiny").write_text("adapter_rank: 3\n")
    assert read_yaml("tiny", CLASSES) == {"adapter_rank": 3}


def test_what_is_neither_is_refused_with_the_names_of_all():
    with pytest.raises(ConfigError, match=r"--config tinny is neither a file nor one of the presets .*tiny"):
        read_yaml("tinny", CLASSES)
