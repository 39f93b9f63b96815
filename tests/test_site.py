"""The documentation: its pages and their links, what is public and documented, what is made of the
code. `make docs` builds it, strictly.
"""

import importlib.util
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

import npt
import npt.diagnostics
import npt.errors
import npt.guard

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINES, WORDS = 140, 1400
"""README's, at most."""


def module(name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def nav() -> list[str]:
    """Return the pages in mkdocs.yml, in order."""

    def paths(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        for inner in node.values() if isinstance(node, dict) else node:
            if not isinstance(node, str):
                yield from paths(inner)

    return list(paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


def test_the_pages_are_those_of_the_navigation() -> None:
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(nav()) == sorted(pages)


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES and len(text.split()) <= WORDS


def test_links_of_contributing_lead_somewhere() -> None:
    assert dead_links("CONTRIBUTING.md") == []


def test_links_of_readme_lead_somewhere() -> None:
    assert dead_links("README.md") == []


def dead_links(name: str) -> list[str]:
    """Return the links of a page outside the site to no file, or no heading."""
    text = (ROOT / name).read_text(encoding="utf-8")
    dead = []
    links = re.findall(r"""\]\(([^)\s]+)\)|(?:src|href|srcset)=["']([^"']+)["']""", text)
    for target in ("".join(found) for found in links):
        path, _, anchor = target.partition("#")
        file = ROOT / (path or name)
        if re.match(r"[a-z]+:", target):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file.read_text("utf-8"))):
            dead.append(target)
    return dead


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in headings}


LIST = re.compile(r"^(?:[-*] |\d+\. )")


def test_a_list_follows_an_empty_line() -> None:
    """Without one Python-Markdown makes a paragraph of it, and other readers a list."""
    for page in sorted(DOCS.rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        before = ""
        for line in text.splitlines():
            starts = LIST.match(line) and before.strip() and not before.startswith((" ", "#", "|"))
            assert not starts or LIST.match(before), f"{page.name}: no empty line before: {line}"
            if not (LIST.match(before) and line.startswith(" ")):
                before = line


def public() -> list[tuple[str, Any]]:
    """Return what is public, by name. Importing it takes seconds, so collecting tests does not."""
    return [
        (f"{home.__name__}.{name}", getattr(home, name))
        for home in (npt, npt.guard, npt.diagnostics)
        for name in home.__all__
        if name != "__version__"
    ]


def members(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class defines itself."""
    for name, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def test_what_is_public_is_documented() -> None:
    found = public()
    for name, thing in found.copy():
        if inspect.isclass(thing):
            assert not (thing.__doc__ or "").startswith(f"{thing.__name__}("), f"{name}: made up"
            found += [(f"{name}.{member}", function) for member, function in members(thing)]
    for name, thing in found:
        said = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        first = inspect.cleandoc(said or "").partition("\n\n")[0]
        assert first.endswith((".", ":", ")")), (
            f"{name} has no docstring that opens with a sentence"
        )


def test_docstrings_of_public_functions_name_their_parameters() -> None:
    for name, function in public():
        if inspect.isfunction(inspect.unwrap(function)):
            parameters = inspect.signature(function).parameters
            for parameter in parameters if len(parameters) > 1 else ():
                said = re.search(rf"\b{parameter}\b", function.__doc__ or "")
                assert said, f"{name} does not say of what its {parameter} is"


class TestReference:
    def test_the_pages_are_what_the_code_says(self) -> None:
        generate = module("generate")
        assert generate.stale() == [], f"run: {generate.COMMAND}"

    def test_every_public_name_is_listed_once(self) -> None:
        listed = [name for _, names in module("generate").API.values() for name in names]
        assert sorted(listed) == sorted(name for name, _ in public()), "API of docs/generate.py"

    def test_exit_statuses_and_files_of_a_run_are_listed(self) -> None:
        page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
        names = {
            part.splitlines()[0]: set(re.findall(r"^\| `([^`]+)`", part, re.M))
            for part in page.split("\n## ")
        }
        errors = (value for value in vars(npt.errors).values() if inspect.isclass(value))
        statuses = {str(e.exit_status) for e in errors if hasattr(e, "exit_status")}
        assert statuses <= names["Exit statuses"]
        folder = ROOT / "tests" / "assets" / "before"
        files = {name.partition("/")[0] for name in names["The run folder"]}
        written = {path.name for path in (folder / "run").iterdir()}
        assert written - {"modulation.json"} <= files  # which an earlier version wrote
        checkpoint = {name.partition("/")[0] for name in names["A checkpoint"]}
        assert {path.name for path in (folder / "step-00000002").iterdir()} == checkpoint
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
        keys = {re.sub(r"\.\d+\.", ".<i>.", key) for key in yaml.safe_load(lines.split("\n")[0])}
        assert keys <= names["Keys of metrics.jsonl"]


class TestHook:
    def of_site(self, text: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/page.md"))
        return module("hooks").on_page_markdown(text, page, None, None)

    def test_a_link_to_code_is_its_text(self) -> None:
        text = "See [`flags.py`](../../npt/flags.py) and [the guide](other.md#part).\n"
        assert self.of_site(text) == "See `flags.py` and [the guide](other.md#part).\n"

    def test_code_stays_as_it_is_and_comments_go(self) -> None:
        text = "`[a](../../npt/flags.py)`\n\n    [a](../../b)\n\n```text\n<!-- c -->\n```\n"
        assert self.of_site(f"{text}1.5<!-- tiny:a:b -->\n") == f"{text}1.5\n"

    def test_a_link_to_nothing_is_a_warning(self, caplog) -> None:
        with caplog.at_level(logging.WARNING):
            self.of_site("[a](../../nothing.py)")
        assert "guides/page.md links to ../../nothing.py, which is no file" in caplog.text
