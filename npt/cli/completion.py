"""`npt completion`: a script that a shell loads once, so that no TAB starts Python."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from npt.config import TRACKERS, BaseConfig
from npt.extras import require
from npt.presets import presets, studies

SHELLS = ("bash", "zsh", "fish")

_FILES = ("FILE", "PATH")
_FOLDERS = ("FOLDER", "DIR", "BUNDLE")
"""How the metavars of flags begin whose values are such."""

_PLACES = {
    "resume": "directory",
    "output_dir": "directory",
    "dataset_name": "file",
    "replay_dataset": "file",
    "data": "file",
}
"""Flags whose values are places on disk, though they may be other things."""


def completion(given: dict[str, Any]) -> int:
    """Print a script that completes npt's verbs, flags and their values in a shell."""
    from npt.cli.main import make_parser

    print(script(make_parser("npt"), given["shell"]))
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Write the script for a parser, verbs included.

    Args:
        parser: its actions are given what shtab asks them for.
        shell: one of `SHELLS`.

    Raises:
        ConfigError: shtab, which writes it, is not installed.
    """
    require("shtab", "npt completion")
    import shtab

    for action in _actions(parser):
        found = _values(action, shtab.FILE, shtab.DIRECTORY)
        if found is not None:
            setattr(action, "complete", found)  # noqa: B010 - shtab's own attribute, which argparse's class does not have
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
        else:
            yield action


def _values(action: argparse.Action, file: Any, folder: Any) -> Any:
    """What an action's value may be, where its choices do not say it."""
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    kinds = {"file": file, "directory": folder}
    if action.dest == "config":
        return _words("config", tuple(presets()), "*.yaml")
    if action.dest == "spec":
        return _words("study", tuple(studies()), "*.yaml")
    if action.dest == "model_name":
        return _words("model", (BaseConfig.model_name,), "*/")
    if action.dest == "report_to":
        return _words("tracker", (*TRACKERS, "all", "none"))
    if action.dest in _PLACES:
        return kinds[_PLACES[action.dest]]
    if metavar.startswith(_FILES):
        return file
    return folder if metavar.startswith(_FOLDERS) else None


def _words(name: str, words: tuple[str, ...], files: str | None = None) -> dict[str, Any]:
    """A completer for each shell.

    Args:
        name: of the shells' functions.
        words: that are offered.
        files: a pattern of files that are offered as well, and folders to look for them in; `*/`
            for folders alone.
    """
    function, listed = f"_npt_{name}", " ".join(words)
    folders = files == "*/"
    bash = [f'compgen -W "{listed}" -- "$1"']
    zsh = [f"compadd -- {listed}"]
    fish = [f"printf '%s\\n' {listed}"]
    if files is not None:
        bash += ([] if folders else [f"compgen -f -X '!{files}' -- \"$1\""]) + [
            'compgen -d -- "$1"'
        ]
        zsh.append("_files -/" if folders else f"_files -g '{files}'")
        fish.append(
            "__fish_complete_directories (commandline -ct)"
            if folders
            else f"__fish_complete_suffix {files.removeprefix('*')}"
        )
    return {
        **dict.fromkeys(("bash", "zsh"), function),
        "fish": f"({function})",
        "preamble": {
            "bash": "\n".join([f"{function}() {{", *(f"  {line}" for line in bash), "}"]),
            "zsh": "\n".join([f"{function}() {{", *(f"  {line}" for line in zsh), "}"]),
            "fish": "\n".join([f"function {function}", *(f"  {line}" for line in fish), "end"]),
        },
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
