"""Values for a run's flags that were measured to be good together, by the start of the run.

The fields' own defaults (npt/config/) are those of single settings. Which rate, scale and
objective are good depends on the start (docs/results/choosing-settings.md), and the start on what
there is to solve it with; so the command line chooses them, and says so.
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
"""The settings of a run."""

AUTO = "auto"

EMBEDDED, BUILTIN = BaseConfig.model_name, DataConfig.dataset_name
WEB_TEXT = "cerebras/SlimPajama-627B"

NEAR_DEFAULTS: dict[str, Any] = {
    "targets": STREAM,
    "additive_scale": 1.0,
    "learning_rate": 5e-5,
    "warmup_steps": 10,
}
"""Of a student that is near its teacher from the first step on. Larger rates lose the start, and at
this rate M and B of the products lose it as well (docs/results/real-model.md)."""
OF_PRODUCTS = {"mult_bound", "mult_form"}
"""Flags that the stream alone would leave without effect, as it would --modulation."""
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
"""By default, flags that say the same in another way."""


class Chosen(NamedTuple):
    """The flags of a run, with defaults filled in.

    Attributes:
        notes: lines to print about them.
    """

    flags: dict[str, Any]
    notes: tuple[str, ...] = ()


def with_config(flags: Mapping[str, Any], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Return the flags over the settings of the file in --config, without ignored ones."""
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
    """Return the flags of a run with values for those that are not set.

    Args:
        flags: by name; `init` may be `auto`, which is its default.
        recorded: those of the run that is resumed, if any, which come before any default.
        model_name: of the base, where flags do not say it: an adapter knows its own.
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
            notes.append(f"--init auto: a random start, because of {against}")
        elif asked == AUTO:
            others = " ".join(f"--{name} {v}" for name, v in chosen.items() if name != "init")
            notes.append(
                f"--init auto: a start in closed form (--init calibrated); with it go {others};"
                " --init random starts at random"
            )
    chosen |= _missing({"save_steps": 500}, flags)
    if recorded:
        # the form is that of the run's beginning, whose defaults may have been others
        form = {"targets"} - flags.keys()
        chosen |= {name: recorded[name] for name in form | chosen.keys() if name in recorded}
        return Chosen({**flags, **chosen})
    return Chosen({**flags, **chosen}, tuple(notes))


def _near(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for a student that is near its teacher from the first step on."""
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
    """Return the reason against a calibrated start, as far as the flags tell."""
    if flags.get("residual") == "keep":
        return "--residual keep, whose random start is its base already"
    if flags.get("mult_form") == "half_sigmoid":
        return "--mult_form half_sigmoid, which does not start at 1"
    targets = words(flags.get("targets", STREAM))
    if STREAM not in targets:
        return f"--targets {','.join(targets)}, without stream"
    return None


def with_data(flags: Mapping[str, Any], model_name: str) -> Chosen:
    """Return the flags with a data set: if none is named, the embedded text for the embedded model,
    else text of the web.
    """
    if "dataset_name" in flags or model_name == EMBEDDED:
        return Chosen(dict(flags))
    note = (
        f"no --dataset_name: text is streamed from {WEB_TEXT}; name a file, a folder or another"
        " data set to use that"
    )
    return Chosen({"dataset_name": WEB_TEXT, "streaming": True, **flags}, (note,))


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the flags that mean several settings of a run."""
    unset, names = argparse.SUPPRESS, ", ".join(presets())
    text = f"settings by flag name, a file or a preset ({names}); other flags win"
    parser.add_argument("--config", metavar="FILE.yaml", default=unset, help=text)
    text = "additive modulation only: short for --modulation additive"
    add_switch(parser, "safe_mode", text, unset)


def add_run_settings(parser: argparse.ArgumentParser) -> None:
    """Add the settings of a run, with the defaults of one without other flags; `--init` may be
    `auto`.
    """
    add_settings(parser, *SETTINGS, defaults={**with_defaults({}).flags, "init": AUTO})
    init = parser._option_string_actions["--init"]
    init.choices = (AUTO, *INITS)
    init.help = f"auto: calibrated if that is possible, else random; {init.help}"
