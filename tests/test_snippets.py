"""What README and the documentation print is what works: every command is read by its program, and
those of `npt` and in Python run.
"""

import argparse
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from npt.cli.main import main, make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WENT_NAN = ROOT / "docs" / "guides" / "a-run-went-nan.md"
PROGRAMS = ("npt", "python", "make", "torchrun")
SHORT = {
    "pretrain": "--max_steps 1 --eval_samples 1 --max_length 32 --batch_size 1",
    "evaluate": "--eval_samples 2 --max_length 32",
    "generate": "--max_new_tokens 3",
    "collect": "--num_prompts 2 --max_new_tokens 4",
    "doctor": "",
    "trace": "--max_length 32 --batch_size 1",
    "consolidate": "--eval_samples 2 --max_length 32",
    "transplant": "",
    "report": "",
}
"""Added to a printed command, so that it ends soon; of two values of a flag the last one counts."""
FRESH = ["--init", "random", "--layers", "6,7", "--adapter_rank", "8", "--no_smoke_test"]
"""Added to a run that begins with adapters of its own. A start that is solved is no matter of a
printed command.
"""
HUB, MEASURES = "needs a model hub", "takes minutes of a machine to itself, and measures"
NOT_RUN = {
    r"npt pretrain .*--(model_name (?!tiny)|config (llama|qwen|mistral))": HUB,
    r"npt push ": HUB,
    r"python benchmarks/fetch_model\.py": HUB,
    r"python benchmarks/gpu_check\.py .*(outputs/gpu|benchmarks/results)": "needs a GPU",
    r"make (test|lint|docs)": "is a part of .ci/run",
    r"make (pretrain|real)": "tests/test_presets.py",
    r"make stability|npt sweep |npt report (STUDY|outputs/)": "tests/tools/sweep/test_cli_sweep.py",
    r"npt doctor --data$": "tests/cli/test_cli_doctor.py",
    r"npt doctor --plan": "tests/doctor/test_plan.py",
    r"npt export ": "tests/adapters/files/test_export.py",
    r"npt import ": "tests/cli/test_cli_import.py",
    r"python -m pytest ": "tests/guard/test_recheck.py",
    r"npt replay ": "tests/forensics/test_replay.py",
    r"npt consolidate ": "tests/cli/test_cli_consolidate.py",
    r"npt pretrain .*--modulation both": "tests/train/test_resolve.py",
    r"torchrun |python pretrain_npt_safe\.py": "tests/distributed/test_several_processes.py",
    r"python debug/debug_nan\.py": "tests/faults/test_tracer_demo.py",
    r"python debug/inject_fault\.py .*--trainer": "tests/faults/test_row_cases.py",
    r"python debug/inject_fault\.py (?!.*--trainer)": "tests/faults/test_campaign.py",
    r"python debug/verify_fixes\.py": "tests/faults/test_fixes.py",
    r"python debug/conformance\.py": "tests/faults/test_conformance.py",
    r"python debug/compare_trainers\.py": "tests/guard/test_clean_runs.py",
    r"python benchmarks/h100_hour\.py": "tests/benchmarks/test_gpu_check.py",
    r"python benchmarks/gpu_check\.py .*--device cpu": "tests/benchmarks/test_gpu_check.py",
    r"python benchmarks/crash\.py": "tests/benchmarks/test_endurance.py",
    r"python benchmarks/real\.py": "tests/benchmarks/test_real.py",
    r"python benchmarks/edit\.py": "tests/benchmarks/test_edit.py",
    r"python benchmarks/move\.py": "tests/benchmarks/test_move.py",
    r"python benchmarks/speed\.py": "tests/benchmarks/test_speed.py",
    r"python benchmarks/guards\.py": "tests/benchmarks/test_guards.py",
    r"python benchmarks/compile_kernels\.py": "tests/adapters/test_kernels.py",
    r"python benchmarks/step_cost\.py": "tests/benchmarks/test_step_cost.py",
    r"python benchmarks/fill\.py": "tests/benchmarks/test_fill.py",
    r"python notebooks/execute\.py": "tests/notebooks/test_notebooks.py",
    r"python docs/generate\.py": "tests/test_site.py",
    r"python -m npt\.demo\.build": MEASURES,
}
"""Commands that their program parses here, and no more: why, or which test runs such ones."""
FENCES = {"python", "text", "json", "yaml", "diff", "mermaid"}
"""Kinds of fenced blocks. Only those in Python are run, so that commands are indented."""


def commands(page: Path) -> list[str]:
    """Commands in blocks of four spaces, a line that ends in a backslash with the next, and those
    in backticks that are whole.
    """
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    lines = [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    lines += [
        " ".join(code.split())
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^    .*$", "", prose, flags=re.M))
    ]
    found = [line for line in lines if line.split(" ")[0] in PROGRAMS and len(line.split()) > 1]
    return list(dict.fromkeys(found))


def blocks(page: Path) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S
    )


def words(command: str) -> list[str]:
    """Return the arguments as a shell would, without a comment and the dots for more of them."""
    given = [word for word in shlex.split(command, comments=True) if word != "..."]
    return given[: given.index(">")] if ">" in given else given


def cases(keep: Any = lambda command: True) -> list[Any]:
    """Return a case for each command, by the last page that prints it."""
    pages = {" ".join(words(c)): (c, page) for page in PAGES for c in commands(page) if keep(c)}
    return [
        pytest.param(command, id=f"{page.name}: {text[:70]}")
        for text, (command, page) in pages.items()
    ]


class ReadError(Exception):
    """Ends a program after its arguments."""


@pytest.mark.parametrize("command", cases())
def test_every_printed_command_is_one_that_its_program_reads(command, monkeypatch, capsys) -> None:
    program, *given = words(command)
    if program == "make":
        targets = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M
        )
        assert [word for word in given if "=" not in word and word not in targets] == []
        return
    if program == "npt":
        if len(given) == 1:  # its name alone, in a sentence
            given.append("--help")
        if given[-1] == "--help":
            with pytest.raises(SystemExit, match=r"^0$"):
                make_parser("npt").parse_args(given)
        else:
            make_parser("npt").parse_args(given)
        return
    if program == "torchrun":
        program = (i for i, word in enumerate(given) if word.endswith(".py") or word == "-m")
        given = given[next(program) :]

    read = argparse.ArgumentParser.parse_known_args

    def end(self: argparse.ArgumentParser, *arguments: Any, **named: Any) -> None:
        read(self, *arguments, **named)
        raise ReadError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", end)
    monkeypatch.syspath_prepend(str(ROOT))
    module = given.pop(0) == "-m" if given[0] == "-m" else False
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(ReadError):
        if module:
            runpy.run_module(given[0], run_name="__main__", alter_sys=True)
        else:
            assert (ROOT / given[0]).is_file(), f"{given[0]} is no file"
            monkeypatch.syspath_prepend(str((ROOT / given[0]).parent))
            runpy.run_path(str(ROOT / given[0]), run_name="__main__")


@pytest.fixture(scope="module")
def place(
    short_library: None, copied_bases: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder with what the commands name: RUN, the adapter A, failures.jsonl, data.jsonl, and
    what `npt transplant` reads.
    """
    folder = tmp_path_factory.mktemp("printed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        quick = "--use_quantization --max_steps 1 --eval_samples 2 --max_length 32 --batch_size 2"
        assert main(["pretrain", *quick.split(), *FRESH, "--output_dir", "RUN"]) == 0
        shutil.copytree(folder / "RUN" / "adapter", folder / "A")
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        rows = [json.dumps({"text": part}) for part in text.split("\n\n") if len(part) > 200]
        (folder / "data.jsonl").write_text("\n".join(rows[:30]) + "\n", encoding="utf-8")
        asked = (
            "collect --adapter RUN --output failures.jsonl --num_prompts 6 --max_new_tokens 4"
            " --max_length 32"
        )
        assert main(asked.split()) == 0
        (folder / "examples.txt").write_text("Q: walk A: walked\n", encoding="utf-8")
        (folder / "queries.txt").write_text("Q: play A:\nQ: cook A:\n", encoding="utf-8")
        asked = "transplant --adapter RUN --from_context examples.txt --output past.safetensors"
        assert main([*asked.split(), "--text_to", "Q: play A:"]) == 0
        yield folder


def is_name(command: str) -> bool:
    """Return whether a sentence names a verb, and is no command."""
    return len(words(command)) == 2 and words(command)[0] == "npt"


def not_run(command: str) -> list[str]:
    """Return the entries of NOT_RUN that a command has."""
    return [entry for entry in NOT_RUN if re.match(entry, " ".join(words(command)))]


def ours(command: str) -> bool:
    program, verb, *_ = words(command)
    named = is_name(command) or words(command)[-1] == "--help"
    return program == "npt" and verb in SHORT and not named and not not_run(command)


def test_every_command_is_run_or_listed() -> None:
    given = {command for page in PAGES for command in commands(page)}
    rest = [c for c in given if not ours(c) and not is_name(c) and words(c)[-1] != "--help"]
    assert [command for command in rest if len(not_run(command)) != 1] == []
    reasons = set(NOT_RUN.values()) - {HUB, MEASURES}
    assert [r for r in reasons if r.startswith("tests/") and not (ROOT / r).is_file()] == []


def test_a_fenced_block_is_python_or_no_command() -> None:
    for page in PAGES:
        fences = re.findall(r"^( *)```+(.*)$", page.read_text(encoding="utf-8"), flags=re.M)
        opened = fences[::2]
        unknown = {kind for _, kind in opened} - FENCES
        assert not unknown, f"{page.name} has a block of kind {unknown.pop()!r}"
        assert "python" not in {kind for indent, kind in opened if indent}, f"{page.name}: not run"


@pytest.mark.parametrize("command", cases(ours))
def test_the_printed_commands_of_npt_run(command, place, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(place)
    _, verb, *given = words(command)
    if verb in ("pretrain", "collect"):
        given += [
            "--output_dir" if verb == "pretrain" else "--output",
            str(tmp_path / ("out" if verb == "pretrain" else "out.jsonl")),
        ]
    if verb == "pretrain" and "--adapter" not in given:
        given += FRESH
        if "--active" in given:  # a part of the smaller rank
            given += ["--active", "4"]
    assert main([verb, *given, *SHORT[verb].split()]) == 0, capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err


def test_the_printed_python_runs(tmp_path, monkeypatch) -> None:
    """Run each block after the ones before it, as a reader would type them; what a block takes for
    granted is given to it.
    """
    import torch
    from transformers import TrainingArguments

    import npt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(npt, "TrainConfig", partial(npt.TrainConfig, batch_size=1, eval_samples=2))
    (tmp_path / "page.md").write_text(
        (ROOT / "README.md").read_text(encoding="utf-8")[:400], encoding="utf-8"
    )
    names: dict[str, Any] = {}

    def run(block: str) -> None:
        exec(block.replace("max_steps=20", "max_steps=2"), names)
        if "npt.detach(model)" in block:  # later blocks take adapters for granted
            names["npt"].attach(names["model"], names["npt"].NPTConfig(rank=2, layers="7"))

    # docs/extend changes tables of the package; tests/extend runs its pages, and undoes that
    pages = [page for page in PAGES if page.parent.name != "extend" and page != WENT_NAN]
    others = [block for page in pages for block in blocks(page)]
    run(others.pop(next(i for i, block in enumerate(others) if "load_base" in block)))
    ids = names["tokenizer"]("def area(width, height):\n    return", return_tensors="pt")[
        "input_ids"
    ]
    names["batch"] = {"input_ids": ids, "labels": ids}
    rows = [{"input_ids": row, "labels": row} for row in ids.repeat(4, 1)]
    names["args"] = TrainingArguments(
        "trained", max_steps=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    for block in others:
        if "import Trainer" in block:  # which trains no 4-bit model that PEFT has not converted
            names["model"] = names["npt"].load_base("tiny")[0].requires_grad_(True)
            names["data"] = rows
        if "import Guard" in block:
            names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=1e-4)
            names["scheduler"] = torch.optim.lr_scheduler.ConstantLR(names["optimizer"])
            names["windows"] = [[names["batch"]] * 2]
        run(block)
    assert names["outcome"].applied and not names["outcome"].refused
    assert names["student"].shape == names["teacher"].shape and names["verdict"] is None
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").is_file() and list(
        (tmp_path / "trace").glob("*.json")
    )


def test_the_page_on_nan_ends_with_the_guilty_operation(tmp_path, monkeypatch, capsys) -> None:
    """Between its blocks the weights are loaded again, as it says."""
    import torch
    from transformers import TrainingArguments

    import npt
    from npt.errors import TooManyRefusalsError

    monkeypatch.chdir(tmp_path)
    model, tokenizer = npt.load_base("tiny")
    model.requires_grad_(True)
    model.get_input_embeddings().weight.data[tokenizer.pad_token_id] = 0
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text = "def area(width, height):\n    return"
    rows = tokenizer(text, return_tensors="pt")["input_ids"].repeat(4, 1)
    rows[2, -1] = tokenizer.pad_token_id
    settings = {"max_steps": 4, "per_device_train_batch_size": 1, "logging_steps": 1}
    quiet = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    names = {
        "npt": npt,
        "model": model,
        "tokenizer": tokenizer,
        "args": TrainingArguments("trained", **settings, **quiet),
        "data": [{"input_ids": row, "labels": row} for row in rows],
    }
    plain, guarded, findings, watched, read = blocks(WENT_NAN)
    assert all(
        len([line for line in block.splitlines() if line]) <= 8
        for block in (plain, guarded, findings, watched, read)
    )
    exec(plain, names)
    said = capsys.readouterr().out
    assert "'loss': '0', 'grad_norm': 'nan'" in said  # as the page shows
    assert not any(torch.isfinite(p).all() for p in model.parameters())
    model.load_state_dict(saved)
    exec(guarded, names)
    assert "'refused': 1" in capsys.readouterr().out
    assert all(torch.isfinite(p).all() for p in model.parameters())
    exec(findings, names)
    said = capsys.readouterr().out
    shown = WENT_NAN.read_text(encoding="utf-8")
    for line in said.splitlines():
        assert line in shown or line.startswith("  line: "), line
    assert "vanishing norm" in said and "div in model.embed_tokens" in said
    model.load_state_dict(saved)  # its head trains the padding's embedding too
    exec(watched, {**names, "batch": {"input_ids": rows[:2]}})
    assert "invalid argument: log of -" in capsys.readouterr().out
    with pytest.raises(TooManyRefusalsError):
        exec(guarded.replace("data))", "data), max_refused=1)"), names)
    (folder,) = (tmp_path / "trained" / "postmortem").iterdir()
    exec(read.replace("step-00000000", folder.name), names)
    assert "div in model.embed_tokens" in capsys.readouterr().out
