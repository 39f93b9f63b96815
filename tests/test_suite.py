"""The suite itself: its tiers, and what it asks of an environment."""

import ast
import os
import sys
from pathlib import Path

import pytest
from forked import Forked
from tiers import listed

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"

GPU_MACHINE = {"accelerate", "bitsandbytes", "datasets", "huggingface_hub", "matplotlib", "numpy"}
GPU_MACHINE |= {"peft", "pyarrow", "pytest", "rich", "safetensors", "tensorboard", "tokenizers"}
GPU_MACHINE |= {"torch", "transformers", "yaml"}
"""Packages that tests on a GPU may import. Others do not come with an environment for training."""


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
    return {name.partition(".")[0] for name in found}


def gpu_files() -> list[Path]:
    """The files that pytest imports for tests/gpu, helpers of the suite among them."""
    helpers = {
        path.stem: path
        for path in TESTS.rglob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    }
    files = [TESTS / "conftest.py", *sorted((TESTS / "gpu").glob("*.py"))]
    for path in files:
        files += [
            helpers[name]
            for name in sorted(imported(path) & helpers.keys())
            if helpers[name] not in files
        ]
    return files


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=str(path.relative_to(TESTS))) for path in gpu_files()]
)
def test_tests_on_a_gpu_import_what_a_gpu_machine_has(path: Path) -> None:
    own = {
        "npt",
        "benchmarks",
        "faults",
        "host_waits",
        "random_base",
        *(helper.stem for helper in gpu_files()),
    }
    unknown = imported(path) - GPU_MACHINE - own - sys.stdlib_module_names
    assert not unknown, f"{path.relative_to(ROOT)} imports {', '.join(sorted(unknown))}"


def test_the_tests_on_a_gpu_start_without_plugins(tmp_path) -> None:
    """A machine without the index has pytest and no plugin of it, and the settings in
    pyproject.toml are strict.
    """
    log = tmp_path / "log"

    def collect() -> int:
        os.chdir(ROOT)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        for name in ("conftest", "tiers"):
            sys.modules.pop(name, None)
        return pytest.main(["tests/gpu", "-m", "gpu", "-q", "-p", "no:cacheprovider"])

    # 0: run on a GPU. 5: everything was deselected, or there is nothing to collect.
    assert Forked(collect, log).wait() in (0, 5), log.read_text()
    assert "error" not in log.read_text().lower()


class TestTiers:
    def test_every_entry_of_the_list_names_what_there_is(self) -> None:
        parsed: dict[str, list[ast.stmt]] = {}
        for entry in listed():
            path, *names = entry.split("::")
            assert (ROOT / path).is_file(), f"slow.txt: there is no {path}"
            if path not in parsed:
                parsed[path] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
            inside = parsed[path]
            for name in names:
                named = [node for node in inside if getattr(node, "name", None) == name]
                assert named, f"slow.txt: {path} has no {'::'.join(names)}"
                inside = named[0].body

    def test_every_file_has_a_fast_test(self) -> None:
        """A fault that breaks a whole module is seen at once. Files for a browser or a card are not
        for every machine.
        """
        names = {entry for entry in listed() if "::" not in entry}
        assert not names, (
            f"slow.txt lists whole files: {', '.join(sorted(names))}; list their slow tests"
        )
