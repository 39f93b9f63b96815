"""Imports run one way: a module imports from its own package and from lower levels, never from
its own level or above.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import npt

ROOT = Path(npt.__file__).parent

# Low to high. A unit is a module or package directly below npt; several on one line may not import
# one another.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "presets", "figures"),
    ("streams", "parser"),
    ("files", "console", "stored", "extras", "config", "versions"),
    ("flags", "random_state", "manifest", "device", "hooks", "batch", "packed"),
    ("distributed",),
    ("tracer",),
    ("guard",),
    ("data",),
    ("base",),
    ("adapters",),
    ("distill",),
    ("calibration",),
    ("evaluation",),
    ("report",),
    ("runs",),
    ("recorder",),
    ("diagnostics",),
    ("forensics",),
    ("train",),
    ("tools", "doctor"),
    ("__init__",),
    ("cli", "demo"),
    ("__main__",),
)

LATE = {("guard", "forensics"), ("tracer", "adapters")}
"""Imports from above that are made when they are first needed, within a function: the guard offers
the bundles that are made of it, and a trace of packed rows needs the masks of the base's family.
"""

FILES = sorted(path for path in ROOT.rglob("*.py"))


def level(unit: str) -> int:
    (found,) = [i for i, units in enumerate(LEVELS) if unit in units]
    return found


def unit_of(path: str) -> str:
    """'distill/local.py' -> 'distill', 'errors.py' -> 'errors'."""
    return path.split("/", 1)[0].removesuffix(".py")


def imported_modules(source: str, path: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of npt in `source`, wherever it is, relative ones
    resolved.
    """
    package = ["npt", *path.split("/")[:-1]]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from npt import data` names a unit, `from npt.data import batch` is settled by its
            # package.
            found += (
                [(node.lineno, f"npt.{alias.name}") for alias in node.names]
                if module == "npt"
                else [(node.lineno, module)]
            )
    return [(line, name) for line, name in found if name == "npt" or name.startswith("npt.")]


def violations(source: str, path: str) -> list[str]:
    """Return what `source`, at `path` below npt, imports against the rules."""
    own = unit_of(path)
    units = {unit for units in LEVELS for unit in units}
    found: list[str] = []
    for line, name in imported_modules(source, path):
        other = name.split(".")[1] if "." in name else "__init__"
        # `from npt import Trainer` goes through npt/__init__.py
        other = other if other in units else "__init__"
        allowed = other == own or level(other) < level(own) or (own, other) in LATE
        if not allowed:
            found.append(f"npt/{path}:{line}: {own} imports {name}")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_module_imports_from_its_own_package_and_from_below_only(file) -> None:
    assert violations(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix()) == []


def test_every_module_has_a_level() -> None:
    found = {unit_of(path.relative_to(ROOT).as_posix()) for path in FILES}
    assert found <= {unit for units in LEVELS for unit in units}


@pytest.mark.parametrize("package", ["runs", "train"])
def test_the_modules_of_a_run_import_one_way(package) -> None:
    """Imports for types count too, and those within functions."""
    graph = {}
    for path in (ROOT / package).glob("*.py"):
        source = path.read_text(encoding="utf-8")
        names = imported_modules(source, path.relative_to(ROOT).as_posix())
        graph[f"npt.{package}.{path.stem}"] = {name for _, name in names}
    TopologicalSorter(graph).prepare()  # raises for a circle


def test_the_page_of_the_architecture_has_every_package_in_this_order() -> None:
    page = (ROOT.parent / "docs" / "extend" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    packages = {path.parent.name for path in ROOT.glob("*/*.py")} - {"demo", "presets", "config"}
    ordered = [unit for units in LEVELS for unit in units if unit in packages]
    assert named[: len(ordered)] == ordered


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("base/linear.py", "from npt.adapters.layer import NPTLayer"),
        ("adapters/layer.py", "def f():\n    import npt.distill.hidden_losses"),
        ("adapters/layer.py", "from npt import distill"),
        ("adapters/layer.py", "from npt import Trainer"),
        ("batch.py", "import npt"),
        ("files.py", "from npt.config import NPTConfig"),
        ("distill/hidden_losses.py", "from ..evaluation import metrics"),
        ("tracer/trace.py", "from npt.evaluation.metrics import figures"),
        ("train/loop.py", "from npt.tools.sweep.run import run"),
        ("train/trainer.py", "from npt.demo.build import main"),
        ("errors.py", "from . import config"),
    ],
)
def test_the_check_finds_what_is_forbidden(path, source) -> None:
    assert len(violations(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("adapters/layer.py", "from npt.base.linear import dense_weight\nfrom .adapter import X"),
        ("train/trainer.py", "from npt.tracer import watchdogs"),
        ("guard/forensics.py", "from npt.tracer.trace import first_fault"),
        ("cli/main.py", "import npt"),
        ("demo/build.py", "from npt.data.readers import builtin_files"),
        ("__init__.py", "from npt.train.trainer import Trainer"),
    ],
)
def test_the_check_lets_pass_what_is_allowed(path, source) -> None:
    assert violations(source, path) == []


ALONE = """
import sys, torch, safetensors.torch
before = set(sys.modules)
import npt.guard
import npt.tracer.trace
from npt.batch import Sample, collate
new = {name.partition(".")[0] for name in sys.modules.keys() - before}
print(sorted(new - sys.stdlib_module_names))

class Reader(torch.nn.Embedding):
    def forward(self, input_ids, **_):
        return super().forward(input_ids).sum()

assert npt.tracer.trace.trace(Reader(3, 2), collate([Sample("a", (1, 2))])) is None
print({"transformers", "npt.data", "npt.base", "npt.adapters"} & sys.modules.keys())
"""


def test_the_guard_and_the_tracer_need_torch_and_safetensors_alone() -> None:
    """A guard in another project's trainer must not load the libraries of distillation, nor the
    packages that need them.
    """
    found = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert found.stdout.splitlines() == ["['npt']", "set()"], found.stderr


NOTE = "--share_embeddings has no effect: teacher and student share the whole base"
"""The first line of a run of this preset, printed before torch is loaded."""

HELPED = """
import sys
from npt.__main__ import main

try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, file=sys.stderr)
heavy = {"rich", "yaml", "torch", "npt.config", "npt.cli.pretrain", "inspect", "argparse"}
print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""


REFUSED = """
import sys
from npt.__main__ import main

print(main(sys.argv[1:]), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("verb", "begins", "message"),
    [
        ("pretrain --learning_rate 1e-4 --dataset_name no.txt", [NOTE], "no file at no.txt"),
        ("pretrain --batch_size 0", [], "--batch_size is 0"),
        ("doctor --data no.txt", [], "no file at no.txt"),
    ],
)
def test_a_wrong_flag_and_a_missing_file_are_refused_without_torch(verb, begins, message) -> None:
    program = [sys.executable, "-c", REFUSED, *verb.split(), "--config", "tiny"]
    found = subprocess.run(program, capture_output=True, text=True)
    assert message in found.stderr
    assert found.stdout.splitlines() == [*begins, "2 False"]


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_the_program_lists_its_verbs_with_argparse_alone(flag) -> None:
    program = [sys.executable, "-c", HELPED, flag]
    found = subprocess.run(program, capture_output=True, text=True)
    assert found.stderr.splitlines() == ["0", "['argparse']"]


CHECKED = """
import sys
from npt.cli.main import main

assert main(["doctor", "--data", sys.argv[1]]) == 0
slow = {"bitsandbytes", "transformers.modeling_utils", "npt.adapters.layer", "npt.guard"}
slow |= {"transformers.core_model_loading", "torch._dynamo", "torch.distributed.tensor", "datasets"}
print(slow & sys.modules.keys(), file=sys.stderr)
"""


def test_a_dataset_is_checked_without_model_classes(tmp_path) -> None:
    """They take longer to import than most datasets to check; a tokenizer needs none of them. Nor
    does it need a family's configuration class, which imports torch's compiler.
    """
    data = tmp_path / "data.txt"
    data.write_text("A sentence to check. " * 40)
    program = [sys.executable, "-c", CHECKED, str(data)]
    found = subprocess.run(program, capture_output=True, text=True)
    assert found.stderr.splitlines() == ["set()"]
