"""What an import loads, the way of a batch to its update, and the number of verbs and settings.

Nothing here counts lines: a ceiling on lines is paid with density.
"""

import ast
import dataclasses
import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import npt
from npt.cli.main import VERBS
from npt.config import BaseConfig, DataConfig, NPTConfig, TrainConfig
from npt.train.loop import Loop

ROOT = Path(npt.__file__).parent.parent
SOURCES = (".py", ".j2", ".css", ".js")

MODULES = {"import npt.guard": 24, "from npt import Trainer": 116}
"""Modules of npt that a statement loads."""

WAY = (24, 11)
"""Files on the way of a batch to its update, and the depth of calls."""
AFTER_A_STEP = {"_account", "_evaluate_if_due", "say", "raise_together"}
"""Functions of the loop that are not on it: counting, logging."""

VERBS_AT_MOST, SETTINGS_AT_MOST = 14, 69


def files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]


NOT_FOR_THE_GUARD = {"accelerate", "bitsandbytes", "datasets", "peft", "tokenizers", "transformers"}


def test_an_import_reads_no_more_than_it_needs() -> None:
    """In one process, since the guard's modules are among the Trainer's."""
    code = f"""import json, sys
read = {{}}
for statement in {list(MODULES)}:
    exec(statement)
    packages = [name.split(".")[0] for name in sys.modules]
    read[statement] = packages.count("npt"), sorted(set(packages))
print(json.dumps(read))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert not ended.returncode, ended.stderr
    read = json.loads(ended.stdout)
    for statement, most in MODULES.items():
        assert read[statement][0] <= most, statement
    assert not NOT_FOR_THE_GUARD & set(read["import npt.guard"][1])


def test_the_way_of_a_batch_is_short(tmp_path, monkeypatch) -> None:
    """Watch two steps of the embedded model from the request for their first window on. A file is
    on the way if a function of it is called; the depth is that of npt's own functions.
    """
    package, read, depth, run = str(Path(npt.__file__).parent), set(), 0, Loop.train

    def watch(frame: Any, event: str, _: Any) -> None:
        nonlocal depth
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event != "call" or not file.startswith(package) or name == "<module>":
            return
        names = []
        while frame is not None and run.__code__ not in names:
            code, frame = frame.f_code, frame.f_back
            if code.co_filename.startswith(package) and not code.co_name.startswith("<"):
                names.append(code)
        if not AFTER_A_STEP & {code.co_name for code in names}:
            read.add(file)
            depth = max(depth, len(names))

    def watched(*arguments: Any) -> None:
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            run(*arguments)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    monkeypatch.setattr(Loop, "train", watched)
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps({"text": "A sentence that is a sample. " * 16}) + "\n") * 16)
    model, tokenizer = npt.load_base("tiny")
    npt.attach(model, NPTConfig(rank=4, layers="upper_half"))
    config = TrainConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        eval_samples=1,
        smoke_test=False,
        batch_size=2,
    )
    source = DataConfig(dataset_name=str(data), max_length=64)
    npt.Trainer(model, tokenizer, None, config, data_config=source).train()
    for number, most in zip((len(read), depth), WAY, strict=True):
        assert number <= most, sorted(read)


def test_verbs_and_settings_are_few() -> None:
    settings = [
        f for c in (BaseConfig, NPTConfig, DataConfig, TrainConfig) for f in dataclasses.fields(c)
    ]
    assert len(VERBS) <= VERBS_AT_MOST and len(settings) <= SETTINGS_AT_MOST


def test_a_class_has_a_name_of_its_own() -> None:
    trees = [ast.parse(path.read_text("utf-8")) for path in files("npt") if path.suffix == ".py"]
    names = Counter(n.name for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    assert [name for name, times in names.items() if times > 1] == []
