"""What a run does where its flags are silent: values that were measured to be good together, by how
it starts.

The fields' own defaults (npt/config/) are those of single settings. Which rate, scale and
objective are good depends on the start (docs/choosing-settings.md), and the start on what there is
to solve it with; so the command line chooses them here, and says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npt.config import INITS, BaseConfig, DataConfig
from npt.errors import ConfigError
from npt.train.sources import DATASETS, named

AUTO = "auto"

EMBEDDED, BUILTIN = BaseConfig.model_name, DataConfig.dataset_name
_NEAR: dict[str, Any] = {"additive_scale": 1.0, "learning_rate": 3e-4, "warmup_steps": 10}
_WHOLE: dict[str, Any] = {"strategy": "end_to_end", "logit_kl_weight": 1.0}
_SAVING: dict[str, Any] = {"save_steps": 500}
_EMBEDDED: dict[str, dict[str, Any]] = {
    "calibrated": {
        "adapter_rank": 48,
        "calibration_tokens": 32768,
        "calibration_rounds": 1,
        "max_steps": 150,
        "log_steps": 25,
    },
    "random": {"max_steps": 600},
}
_INSTEAD = {"adapter_rank": ("ranks", "rank_budget"), "max_steps": ("num_epochs", "num_samples")}
"""Of a default those flags that say the same in another way."""


@dataclass(frozen=True)
class Chosen:
    """given: flags with defaults. said: lines about them. fallback: the start was chosen, and a
    random one will do.
    """

    given: dict[str, Any]
    said: tuple[str, ...]
    fallback: bool = False


def with_defaults(
    given: Mapping[str, Any], before: Mapping[str, Any] | None = None, *, solvable: bool = True
) -> Chosen:
    """The flags of a run with values for those that are not given.

    Args:
        given: by flag name; `init` may be `auto`, which it is where it is missing.
        before: those of the run that is taken up, where there is one: they come before any default.
        solvable: False where a start was found not to be solvable.
    """
    asked = given.get("init", AUTO)
    flags = {
        name: value
        for name, value in given.items()
        if name != "init" or (given.get("adapter") is not None and value != AUTO)
    }
    said: list[str] = []
    against = _why_random(flags) if solvable else "too little text to solve one"
    if flags.get("adapter") is not None:
        chosen = _near(flags)
    else:
        init = asked if asked != AUTO else "calibrated" if against is None else "random"
        chosen = {"init": init, **(_near(flags) if init == "calibrated" else {})}
        if _on_embedded_text(flags):
            chosen |= _missing(_EMBEDDED[init], flags)
        if asked == AUTO and init == "random":
            said.append(f"--init auto: a random start, because of {against}")
        elif asked == AUTO:
            with_it = " ".join(
                f"--{name} {value}" for name, value in chosen.items() if name != "init"
            )
            said.append(
                f"--init auto: the start is solved (--init calibrated); with it go {with_it};"
                " --init random starts at random"
            )
    chosen |= _missing(_SAVING, flags)
    if before:
        return Chosen(
            {**flags, **chosen, **{name: before[name] for name in chosen if name in before}}, ()
        )
    wants_solving = any(name.startswith(("rank_budget", "calibration_")) for name in flags)
    fallback = asked == AUTO and chosen.get("init") == "calibrated" and not wants_solving
    return Chosen({**flags, **chosen}, tuple(said), fallback)


def _near(flags: Mapping[str, Any]) -> dict[str, Any]:
    """For a student that is near its teacher from the first step on."""
    objective = {"stages", "loss", *_WHOLE}
    whole = {} if objective & flags.keys() or flags.get("shard_base") else _WHOLE
    form = {
        name: value
        for name, value in _NEAR.items()
        if flags.get("adapter") is None or name != "additive_scale"
    }
    form["warmup_steps"] = min(form["warmup_steps"], int(flags.get("max_steps") or 100) // 10)
    return {**_missing(form, flags), **whole}


def _missing(defaults: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in defaults.items()
        if not {name, *_INSTEAD.get(name, ())} & flags.keys()
    }


def _why_random(flags: Mapping[str, Any]) -> str | None:
    """What keeps a start from being solved, as far as the flags tell."""
    for name in ("shard_base", "device_map"):
        if flags.get(name):
            return f"--{name}: solving needs the base on one device"
    if flags.get("residual") == "keep":
        return "--residual keep, whose random start is its base already"
    if flags.get("mult_form", "sigmoid") != "sigmoid":
        return f"--mult_form {flags['mult_form']}: only the sigmoid's is solved"
    started = next(
        (name for name in ("init_std_a", "init_std_b", "init_std_m", "init_a") if name in flags),
        None,
    )
    return None if started is None else f"--{started}, which is of a random start"


def _on_embedded_text(flags: Mapping[str, Any]) -> bool:
    mixed = flags.get("dataset_mix") is not None
    return (
        not mixed
        and flags.get("model_name", EMBEDDED) == EMBEDDED
        and flags.get("dataset_name", BUILTIN) == BUILTIN
    )


def over(written: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file with flags beside them, which win: also a mixture over the file's one
    data set, and the other way round.
    """
    instead = {"dataset_mix": "dataset_name", "dataset_name": "dataset_mix"}
    lost = {other for flag, other in instead.items() if flag in given}
    return {**{name: value for name, value in written.items() if name not in lost}, **given}


def with_data(given: Mapping[str, Any], model_name: str) -> Chosen:
    """The flags with a data set: short names written out, and where none is named the embedded text
    for the embedded model alone.

    Args:
        given: by flag name.
        model_name: of the base.

    Raises:
        ConfigError: a data set and a mixture.
    """
    name, mixed = given.get("dataset_name"), given.get("dataset_mix")
    if name is not None and mixed is not None:
        raise ConfigError(
            f"--dataset_name is {name} and --dataset_mix {mixed}; name that data set in the"
            " mixture, or drop one of the two"
        )
    short = None if name is None else named(name)
    if short is not None:
        return Chosen(
            {**short, **{flag: value for flag, value in given.items() if flag != "dataset_name"}},
            (),
        )
    if name is not None or mixed is not None or model_name == EMBEDDED:
        return Chosen(dict(given), ())
    web_text = DATASETS["slimpajama"]["dataset_name"]
    said = (
        f"no --dataset_name: text is streamed from {web_text}; name a file, a folder or another"
        " data set to use that"
    )
    return Chosen({**DATASETS["slimpajama"], **given}, (said,))


def offer_auto(parser: argparse.ArgumentParser) -> None:
    """Let `--init` take `auto` as well, and say that it is the default."""
    action = parser._option_string_actions["--init"]
    action.choices = (AUTO, *INITS)
    action.help = (
        "auto: calibrated where that can be solved, else random; random: small normal start;"
        " calibrated: closed form (default: auto)"
    )
