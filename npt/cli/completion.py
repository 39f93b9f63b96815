"""`npt completion`: a script that a shell loads once, so that no TAB starts Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from npt.config import TRACKERS, BaseConfig
from npt.console import put
from npt.extras import require
from npt.presets import presets, studies

SHELLS = ("bash", "zsh", "fish")

_FILES = ("FILE", "PATH")
_FOLDERS = ("FOLDER", "DIR", "BUNDLE")
"""Beginnings of the metavars of flags that take files and folders."""

_FILE_OR_NAME = ("dataset_name", "replay_dataset", "data")
_FOLDER_OR_NAME = ("resume", "output_dir")
"""Further flags that take them, though other values too."""


def completion(given: dict[str, Any]) -> int:
    """Print a script that completes npt's verbs, flags and their values in a shell."""
    from npt.cli.main import make_parser

    require("shtab", "npt completion")
    import shtab

    parser = make_parser("npt")
    for action in _actions(parser):
        found = _values(action, shtab.FILE, shtab.DIRECTORY)
        if found is not None:
            setattr(action, "complete", found)  # noqa: B010 - shtab's own attribute, which argparse's class does not have
    put(shtab.complete(parser, given["shell"]))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
        else:
            yield action


def _values(action: argparse.Action, file: Any, folder: Any) -> Any:
    """Return a completer for the action's value, unless its choices are enough."""
    match action.dest:
        case "config":
            return _words("config", presets(), "*.yaml")
        case "spec":
            return _words("study", studies(), "*.yaml")
        case "model_name":
            return _words("model", (BaseConfig.model_name,), "*.gguf")
        case "report_to":
            return _words("tracker", (*TRACKERS, "all", "none"))
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.dest in _FOLDER_OR_NAME or metavar.startswith(_FOLDERS):
        return folder
    return file if action.dest in _FILE_OR_NAME or metavar.startswith(_FILES) else None


def _words(name: str, words: Any, files: str | None = None) -> dict[str, Any]:
    """Return a completer of words for each shell, by functions of this name.

    Args:
        files: a pattern of files to offer as well, with folders to look for them in.
    """
    function, listed = f"_npt_{name}", " ".join(words)
    bash = [f'compgen -W "{listed}" -- "$1"']
    zsh = [f"compadd -- {listed}"]
    fish = [f"printf '%s\\n' {listed}"]
    if files is not None:
        bash += [f"compgen -f -X '!{files}' -- \"$1\"", 'compgen -d -- "$1"']
        zsh.append(f"_files -g '{files}'")
        fish.append(f"__fish_complete_suffix {files.removeprefix('*')}")

    def body(opening: str, lines: list[str], closing: str) -> str:
        return "\n".join([opening, *(f"  {line}" for line in lines), closing])

    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "preamble": {
            "bash": body(f"{function}() {{", bash, "}"),
            "zsh": body(f"{function}() {{", zsh, "}"),
            "fish": body(f"function {function}", fish, "end"),
        },
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
