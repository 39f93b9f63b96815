"""Defaults of a run's flags that depend on each other.

The best rate, scale and objective depend on the start (docs/results/choosing-settings.md), so the
command line chooses them together and prints them.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from npt.cli.arguments import add_switch
from npt.config import INITS, STREAM, BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.config.field import words
from npt.flags import add_settings, read_yaml
from npt.presets import presets

SETTINGS = (BaseConfig, NPTConfig, DataConfig, TrainConfig)
"""The classes of a run's settings."""

AUTO = "auto"

EMBEDDED, BUILTIN = BaseConfig.model_name, DataConfig.dataset_name
WEB_TEXT = "cerebras/SlimPajama-627B"

NEAR_DEFAULTS: dict[str, Any] = {
    "targets": STREAM,
    "additive_scale": 1.0,
    "learning_rate": 5e-5,
    "warmup_steps": 10,
}
"""Defaults for a student that starts close to its teacher. Higher rates make it worse, and at this
rate so does training M and B of the products (docs/results/real-model.md)."""
OF_PRODUCTS = {"mult_bound", "mult_form"}
"""Flags that have no effect if the stream is the only target."""
END_TO_END_DEFAULTS: dict[str, Any] = {"strategy": "end_to_end", "logit_kl_weight": 1.0}
EMBEDDED_DEFAULTS: dict[str, dict[str, Any]] = {
    "calibrated": {
        "adapter_rank": 48,
        "calibration_tokens": 32768,
        "max_steps": 150,
        "log_steps": 25,
    },
    "random": {"max_steps": 600},
}
OTHER_WAYS = {"adapter_rank": ("ranks",), "max_steps": ("num_epochs", "num_samples")}
"""For some defaults, the flags that replace them."""


class Chosen(NamedTuple):
    """The flags of a run.

    Attributes:
        flags: the flags, with defaults filled in.
        notes: lines to print about the defaults.
    """

    flags: dict[str, Any]
    notes: tuple[str, ...] = ()


def with_config(flags: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return the flags and the settings of --config, except `ignored` ones. Flags win."""
    if "config" not in flags:
        return dict(flags)
    extra = {"safe_mode": bool, "any_base": bool, "adapter": str}
    settings = read_yaml(flags["config"], SETTINGS, extra)
    return {**{name: value for name, value in settings.items() if name not in ignored}, **flags}


def with_defaults(
    flags: Mapping[str, Any],
    recorded: Mapping[str, Any] | None = None,
    model_name: str | None = None,
) -> Chosen:
    """Return the flags of a run with defaults filled in.

    Args:
        flags: values by name; `init` may be `auto`, the default.
        recorded: flags of the run to resume, if any; they take precedence over defaults.
        model_name: the base, if no flag names it but an adapter does.
    """
    asked, adapter = flags.get("init", AUTO), flags.get("adapter") is not None
    flags = {n: v for n, v in flags.items() if n != "init" or not (adapter or asked == AUTO)}
    notes: list[str] = []
    if adapter:
        chosen = _near(flags)
    else:
        against = _why_random(flags)
        init = asked if asked != AUTO else "calibrated" if against is None else "random"
        chosen = {"init": init, **(_near(flags) if init == "calibrated" else {})}
        base = flags.get("model_name", model_name or EMBEDDED)
        if (base, flags.get("dataset_name", BUILTIN)) == (EMBEDDED, BUILTIN):
            chosen |= _missing(EMBEDDED_DEFAULTS[init], flags)
        if asked == AUTO and init == "random":
            notes.append(f"--init auto: random start, because of {against}")
        elif asked == AUTO:
            others = " ".join(f"--{name} {v}" for name, v in chosen.items() if name != "init")
            notes.append(
                f"--init auto: closed-form start (--init calibrated), with {others}; use --init"
                " random for a random start"
            )
    chosen |= _missing({"save_steps": 500}, flags)
    if recorded:
        # defaults may have changed since the run began
        form = {"targets"} - flags.keys()
        chosen |= {name: recorded[name] for name in form | chosen.keys() if name in recorded}
        return Chosen({**flags, **chosen})
    return Chosen({**flags, **chosen}, tuple(notes))


def _near(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for a student that starts close to its teacher."""
    form, objective = dict(NEAR_DEFAULTS), {"loss", *END_TO_END_DEFAULTS}
    if flags.get("adapter") is not None:
        del form["additive_scale"], form["targets"]
    elif flags.get("modulation", "additive") != "additive" or OF_PRODUCTS & flags.keys():
        del form["targets"]
    form["warmup_steps"] = min(form["warmup_steps"], int(flags.get("max_steps") or 100) // 10)
    chosen = objective & flags.keys()
    return {**_missing(form, flags), **({} if chosen else END_TO_END_DEFAULTS)}


def _missing(defaults: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in defaults.items()
        if not {name, *OTHER_WAYS.get(name, ())} & flags.keys()
    }


def _why_random(flags: Mapping[str, Any]) -> str | None:
    """Return the flag that rules out a closed-form start, with the reason, or None."""
    if flags.get("residual") == "keep":
        return "--residual keep, whose random start already equals its base"
    if flags.get("mult_form") == "half_sigmoid":
        return "--mult_form half_sigmoid, whose multipliers do not start at 1"
    targets = words(flags.get("targets", STREAM))
    if STREAM not in targets:
        return f"--targets {','.join(targets)}, without stream"
    return None


def with_data(flags: Mapping[str, Any], model_name: str) -> Chosen:
    """Return the flags with a dataset.

    The default is the built-in text for the embedded model, and web text for any other.
    """
    if "dataset_name" in flags or model_name == EMBEDDED:
        return Chosen(dict(flags))
    note = (
        f"no --dataset_name: streaming text from {WEB_TEXT}; to train on your own text, pass a file"
        " or folder"
    )
    return Chosen({"dataset_name": WEB_TEXT, "streaming": True, **flags}, (note,))


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the flags that stand for several settings."""
    unset, names = argparse.SUPPRESS, ", ".join(presets())
    text = f"YAML file of settings, or a preset: {names}; other flags take precedence"
    parser.add_argument("--config", metavar="FILE.yaml", default=unset, help=text)
    text = "same as --modulation additive"
    add_switch(parser, "safe_mode", text, unset)


def add_run_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings of a run; the help shows the defaults of a run without flags."""
    add_settings(parser, *SETTINGS, defaults={**with_defaults({}).flags, "init": AUTO})
    init = parser._option_string_actions["--init"]
    init.choices = (AUTO, *INITS)
    init.help = f"auto: calibrated if possible, else random (the run says why); {init.help}"
