"""Generate docs/reference/api.md and docs/reference/flags.md from the code.

python docs/generate.py [--check]

--check writes nothing; the exit status is 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import npt.diagnostics  # noqa: E402
import npt.guard  # noqa: E402
from npt.cli.main import GROUPS as VERBS_BY_GROUP  # noqa: E402
from npt.cli.main import STATUSES, VERBS, make_parser  # noqa: E402
from npt.config import GROUPS, flag_of, kinds_of  # noqa: E402
from npt.flags import shown_default  # noqa: E402
from npt.parser import ALIASES, REPLACED  # noqa: E402
from npt.train.resolve import EMBEDDED, SETTINGS, with_defaults  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
COMMAND = "python docs/generate.py"
HEAD = f"<!-- {COMMAND} writes this page: change the code, not the page. -->"

API: dict[str, tuple[str, tuple[str, ...]]] = {
    "Bases": (
        "Load a frozen base and identify it.",
        (
            "npt.load_base",
            "npt.load_teacher",
            "npt.import_base",
            "npt.Conversion",
            "npt.base_hash",
            "npt.base_identity",
            "npt.BaseIdentity",
        ),
    ),
    "Adapters": (
        "Convert layers, switch between student and teacher, compute the closed-form start.",
        (
            "npt.NPTConfig",
            "npt.attach",
            "npt.AttachReport",
            "npt.detach",
            "npt.adapters_disabled",
            "npt.adapter_mode",
            "npt.modulation_of",
            "npt.calibrate",
            "npt.Calibration",
        ),
    ),
    "Training": (
        "Distil in one process or several.",
        ("npt.Trainer", "npt.TrainConfig", "npt.DataConfig", "npt.TrainResult", "npt.shard_base"),
    ),
    "Measuring": (
        "Compare the student with its teacher, or use either as a model.",
        (
            "npt.evaluate",
            "npt.Fidelity",
            "npt.student_view",
            "npt.teacher_view",
            "npt.modulation_map",
            "npt.ModulationMap",
        ),
    ),
    "Files": (
        "Save, load, publish and export adapters.",
        (
            "npt.save_adapter",
            "npt.load_adapter",
            "npt.from_pretrained",
            "npt.push_to_hub",
            "npt.export",
        ),
    ),
    "Editing": (
        "Move a token's modulation or a context's code, or write texts into the model.",
        (
            "npt.transplant",
            "npt.transplanted",
            "npt.context_code",
            "npt.ContextCode",
            "npt.consolidate",
            "npt.consolidated",
            "npt.unconsolidate",
        ),
    ),
    "Faults": (
        "Find the operation that made a NaN or Inf.",
        ("npt.trace", "npt.Verdict", "npt.NPTError", "npt.TooManyRefusalsError"),
    ),
    "npt.guard": (
        "The safe step for any training loop.",
        tuple(f"npt.guard.{name}" for name in npt.guard.__all__),
    ),
    "npt.diagnostics": (
        "Record every tensor of chosen steps.",
        tuple(f"npt.diagnostics.{name}" for name in npt.diagnostics.__all__),
    ),
}
"""The public names, by purpose."""

SETTINGS_CLASSES = ("npt.NPTConfig", "npt.TrainConfig", "npt.DataConfig")
"""Classes whose fields are documented as flags."""


def pages() -> dict[str, str]:
    """Return the text of each page, by file name."""
    return {"api.md": api_page(), "flags.md": flags_page()}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, with an empty line at the end."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return [*(f"| {' | '.join(line)} |" for line in cells), ""]


def api_page() -> str:
    lines = ["# Python", "", HEAD, ""]
    lines += [
        "`npt.NPTConfig`, `npt.TrainConfig` and `npt.DataConfig` hold the settings. A field has"
    ]
    lines += ["the name of its [flag](flags.md#settings); only `rank` is `--adapter_rank`.", ""]
    for title, (about, names) in API.items():
        lines += [f"## {title}", "", about, ""]
        for name in names:
            lines += [f"::: {name}", ""]
            if name in SETTINGS_CLASSES:
                lines[-1:] = ["    options: {members: false, merge_init_into_class: false}", ""]
    return "\n".join(lines)


def flags_page() -> str:
    verbs = verb_parsers()
    lines = ["# Commands and flags", "", HEAD, ""]
    lines += [
        "Every verb takes `--help`, and `--debug` to show the traceback of an error. Flags may be"
        " written with dashes (`--max-steps`). A true-or-false flag has a negation"
        " (`--no_smoke_test`). `python pretrain_npt_safe.py` is the same as `npt pretrain`."
        f" {one_line(STATUSES)}",
        "",
    ]
    for group, names in VERBS_BY_GROUP.items():
        links = ([f"[`npt {name}`](#npt-{name})", summary(verbs[name])] for name in names)
        lines += [f"**{group}**", "", *table(["verb", "what it does"], links)]
    lines += ["## Settings", ""]
    lines += [
        "These settings are flags on the command line, keys in the YAML file of `--config`, and"
        " fields in Python.",
        "",
    ]
    for group, title in GROUPS.items():
        lines += [f"### {title}", ""]
        lines += table(["flag", "default", "value", "meaning"], settings_rows(group))
    lines += chosen_defaults()
    for name, parser in verbs.items():
        lines += verb_lines(name, parser)
    lines += ["## Other names", "", "These names from other tools are accepted:", ""]
    lines += table(["name", "flag"], ([f"`--{a}`", f"`--{b}`"] for a, b in ALIASES.items()))
    lines += ["These flags do not exist; use the replacement:", ""]
    lines += table(
        ["name", "replacement"], ([f"`--{name}`", text] for name, text in REPLACED.items())
    )
    return "\n".join(lines)


def verb_parsers() -> dict[str, argparse.ArgumentParser]:
    (verbs,) = (
        action
        for action in make_parser("npt")._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {name: verbs.choices[name] for name in VERBS}


def settings_rows(group: str) -> Iterable[list[str]]:
    for cls in SETTINGS:
        for f in fields(cls):
            if f.metadata["group"] != group:
                continue
            flag = f"`--{flag_of(f)}`"
            value = value_words(f.metadata, kinds_of(f)[0])
            yield [flag, shown_default(f.default), value, f.metadata["help"]]


def value_words(metadata: Mapping[str, Any], kind: type) -> str:
    """Return the values that a setting accepts, and the setting that it needs."""
    bound = metadata["bound"].words
    need = metadata["need"].words
    if metadata["choices"]:
        words = ", ".join(metadata["choices"])
        words = f"list of {words}" if kind is tuple else words
    elif bound and kind is not tuple:
        words = bound.removeprefix("it must be ")
    else:
        words = {bool: "true, false", str: "text", tuple: "list", int: "whole number"}.get(
            kind, "number"
        )
    return f"{words}; needs {need}" if need else words


def chosen_defaults() -> list[str]:
    """Return the table of defaults that depend on the start and the base."""
    cases: dict[str, dict[str, Any]] = {
        "closed-form": {"model_name": "..."},
        "closed-form, embedded model and text": {},
        "random": {"model_name": "...", "init": "random"},
        "random, embedded model and text": {"init": "random"},
    }
    rows = []
    for case, given in cases.items():
        chosen, _ = with_defaults(given, given.get("model_name", EMBEDDED))
        flags = [
            f"`--{name} {value}`"
            for name, value in chosen.items()
            if name not in ("model_name", "init", "dataset_name", "streaming")
        ]
        rows.append([case, " ".join(flags)])
    return [
        "### Defaults of `npt pretrain`",
        "",
        "`--init auto`, the default, uses the closed-form start if it can. The start sets these"
        " defaults, which replace those above:",
        "",
        *table(["start", "defaults"], rows),
    ]


def verb_lines(name: str, parser: argparse.ArgumentParser) -> list[str]:
    lines = [f"## npt {name}", "", *str(parser.description).splitlines(), ""]
    rows, taken = [], []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if shown and group.title in GROUPS.values():
            taken.append(group_words(str(group.title), [action.dest for action in shown]))
            continue
        for action in shown:
            if action.dest not in ("help", "debug"):
                rows.append([f"`{written(action)}`", help_of(action, parser)])
    if rows:
        lines += table(["flag", "meaning"], rows)
    if taken:
        lines += ["Settings: " + "; ".join(taken) + ".", ""]
    return lines


def group_words(title: str, names: list[str]) -> str:
    """Return a link to a group of settings, and the ones that a verb takes if not all."""
    group = next(key for key, text in GROUPS.items() if text == title)
    flags = [flag_of(f) for cls in SETTINGS for f in fields(cls) if f.metadata["group"] == group]
    link = f"[{title.lower()}](#{title.lower().replace(' ', '-')})"
    left_out = [flag for flag in flags if flag not in names]
    if not left_out:
        return link
    word, few = ("without", left_out) if len(left_out) <= len(names) else ("only", names)
    return f"{link}, {word} " + ", ".join(f"`--{flag}`" for flag in few)


def written(action: argparse.Action) -> str:
    """Return a flag or an argument as it is typed."""
    name = action.option_strings[0] if action.option_strings else ""
    choices = ",".join(map(str, action.choices or ()))
    value = "" if action.nargs == 0 else action.metavar or choices or action.dest.upper()
    return f"{name} {f'[{value}]' if action.nargs == '?' else value}".strip()


def help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"{one_line(text)} (required)" if action.required and action.option_strings else text


def summary(parser: argparse.ArgumentParser) -> str:
    return str(parser.description).partition("\n")[0]


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def stale() -> list[str]:
    """Return the names of the pages that are out of date."""
    found = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            found.append(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; list pages that are out of date"
    )
    given = parser.parse_args()
    for name in (names := stale()):
        if not given.check:
            (FOLDER / name).write_text(pages()[name], encoding="utf-8")
        print(f"{name} is out of date: run {COMMAND}" if given.check else f"wrote {name}")
    return 1 if given.check and names else 0


if __name__ == "__main__":
    sys.exit(main())
