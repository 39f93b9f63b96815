"""Checkpoints: what is written comes back bit for bit, every damage is found and named, and nothing
of one that is refused is used.
"""

import hashlib
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import Runs, entry, records, strict
from safetensors.torch import load_file, save_file
from torch import nn

import npt
from npt import manifest as manifest_module
from npt.adapters.converted import adapter_parameters
from npt.config import NPTConfig, TrainConfig
from npt.distill.step import student_guard
from npt.errors import AdapterFileError, CheckpointError, NPTError
from npt.forensics.student import read_student
from npt.guard.window import GradientWindow
from npt.manifest import verify_checkpoint, write_manifest
from npt.runs.checkpoint import OPTIMIZER_TENSORS, newest_good, read_checkpoint

RECORD, TENSORS, MANIFEST = "state.json", "state.safetensors", "manifest.json"
OF_ADAPTER = ("README.md", "adapter_config.json", "adapter_model.safetensors")
FILES = [*(f"adapter/{name}" for name in OF_ADAPTER), RECORD, TENSORS]
SOME = "optimizer.model.layers.1.npt.B.up.exp_avg"


@pytest.fixture(scope="module")
def _made(load_model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A run of three steps with a spike guard, and the model that it left."""
    place = tmp_path_factory.mktemp("made")
    runs = Runs(load_model(), place, lambda: records(3), settings={"skip_spikes": True})
    runs.run("run")
    return runs.model, place / "run" / "checkpoints" / "step-00000003"


@pytest.fixture
def model(_made: tuple[nn.Module, Path]) -> nn.Module:
    """With adapters of the checkpoint's form, and other numbers in them."""
    npt.detach(_made[0])
    npt.attach(_made[0], NPTConfig(rank=2, layers="1,3"), seed=5)
    return _made[0]


@pytest.fixture
def folder(_made: tuple[nn.Module, Path], tmp_path: Path) -> Path:
    """A copy of the checkpoint of step 3."""
    return shutil.copytree(_made[1], tmp_path / "run" / "checkpoints" / "step-00000003")


def transaction_of(model: nn.Module, **config: Any) -> GradientWindow:
    settings = TrainConfig(skip_spikes=True, **config)
    return student_guard(model, settings, [1e-2]).window  # type: ignore[arg-type]


def refused(
    folder: Path, error: type[NPTError] = CheckpointError, model: nn.Module | None = None
) -> str:
    """Return what it is refused with, in one line and with status 5; the model is as it was."""
    parameters = {} if model is None else adapter_parameters(model)
    before = {name: p.detach().clone() for name, p in parameters.items()}
    with pytest.raises(error) as caught:
        read = read_checkpoint(folder)
        if model is not None:
            read.state(model, npt.base_identity(model))
    message = str(caught.value)
    assert caught.value.exit_status == 5
    assert "\n" not in message and message.isprintable() and len(message) < 700
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())
    return message


def change_record(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """As somebody would who makes the sums right again."""
    record = json.loads((folder / RECORD).read_text())
    change(record)
    (folder / RECORD).write_text(json.dumps(record))
    write_manifest(folder)


def change_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = TENSORS
) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    write_manifest(folder)


def test_a_checkpoint_has_its_files_and_their_sums(folder) -> None:
    written = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert written == {*FILES, MANIFEST}
    manifest = strict(folder / MANIFEST)
    assert manifest["files"] == {
        name: {
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
            "bytes": (folder / name).stat().st_size,
        }
        for name in FILES
    }
    verify_checkpoint(folder)


def test_everything_is_put_back_bit_for_bit(model, folder) -> None:
    transaction = transaction_of(model)
    state = read_checkpoint(folder).state(model, npt.base_identity(model))
    state.restore(model, transaction)
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    stored = load_file(folder / TENSORS)
    for name, parameter in adapter_parameters(model).items():
        assert torch.equal(parameter, adapters[f"base_model.model.{name}"])
        moments = transaction.update.optimizer.state[parameter]
        assert set(moments) == set(OPTIMIZER_TENSORS) and float(moments["step"]) == 3.0
        for key, moment in moments.items():
            assert torch.equal(moment, stored[f"optimizer.{name}.{key}"])
            assert bool(moment.any())  # none is a zero that would fit by chance
    assert state.step == 3 and torch.equal(state.random_state["cpu"], stored["rng.0.cpu"])
    spikes = [stored[f"spikes.{name}"].tolist() for name in ("losses", "norms")]
    assert transaction.spikes is not None and len(spikes[0]) == 3
    assert list(transaction.spikes.remembered()) == spikes


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_whichever_byte_of_the_manifest_is_another_it_is_found(folder) -> None:
    content = (folder / MANIFEST).read_bytes()
    for index in range(len(content)):
        flip(folder / MANIFEST, 8 * index + index % 8)
        with pytest.raises(CheckpointError, match=str(folder)):
            verify_checkpoint(folder)
        (folder / MANIFEST).write_bytes(content)
    verify_checkpoint(folder)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut to half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "changed in one bit": lambda path: flip(path, path.stat().st_size * 4),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link to its own content": lambda path: (
        path.rename(path.parents[1] / "content"),
        path.symlink_to(path.parents[1] / "content"),
    ),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "of zeros": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
}


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_to_every_file_is_found_and_named(folder, name, damage) -> None:
    DAMAGE[damage](folder / name)
    assert name in refused(folder) or f"{folder} is incomplete (no manifest" in refused(folder)


@pytest.mark.parametrize("name", ["extra", ".hidden", "adapter/more.py", "deep/down/below", "a\nb"])
def test_a_file_too_many_is_found_and_named(folder, name) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
    assert f"has the extra file {name!r}" in refused(folder)


MANIFESTS: dict[str, Any] = {
    "no files": {"files": {}},
    "files that are a list": {"files": []},
    "no entry": {},
    "sums that are text": {"files": dict.fromkeys(FILES, "sum")},
    "sums that are missing": {"files": {name: {} for name in FILES}},
    "sums that are numbers": {"files": {name: {"sha256": 3, "bytes": "x"} for name in FILES}},
    "a name that leads elsewhere": {"files": {"../../secret": {"sha256": "0" * 64, "bytes": 1}}},
    "an absolute name": {"files": {"/etc/passwd": {"sha256": "0" * 64, "bytes": 1}}},
    "half a surrogate": {"files": {"\ud800": {}}},
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_whose_own_sum_is_right_may_say_anything(folder, case, monkeypatch) -> None:
    files = MANIFESTS[case].get("files")
    if isinstance(files, dict):
        (folder / MANIFEST).write_text(manifest_module._text(files))
    else:
        (folder / MANIFEST).write_text(json.dumps(MANIFESTS[case]))
    opened: list[Path] = []
    digest = hashlib.file_digest

    def watched(stream: Any, name: str) -> Any:
        opened.append(Path(stream.name))
        return digest(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", watched)
    refused(folder)
    assert all(folder in path.resolve().parents for path in opened)


def test_a_manifest_of_any_depth_or_length_is_refused_and_not_read(folder) -> None:
    (folder / MANIFEST).write_text('{"files": ' + '{"a": ' * 50_000 + "1" + "}" * 50_001)
    refused(folder)
    with (folder / MANIFEST).open("w") as stream:
        stream.truncate((64 << 20) + 1)
    assert "more than" in refused(folder)


def test_an_unreadable_file_is_a_checkpoint_that_does_not_verify(folder, monkeypatch) -> None:
    def failing(stream: Any, _: str) -> None:
        raise OSError(5, "Input/output error", stream.name)

    monkeypatch.setattr(hashlib, "file_digest", failing)
    assert "Input/output error" in refused(folder)


@pytest.fixture
def run(folder: Path) -> Path:
    """`checkpoints/` with copies of the checkpoint as those of the steps 1 to 3."""
    for step in (1, 2):
        shutil.copytree(folder, folder.parent / f"step-{step:08d}")
    return folder.parent


def test_the_newest_that_verifies_is_picked_and_others_are_reported(run) -> None:
    found, broken = newest_good(run)
    assert found is not None and found.folder.name == "step-00000003" and broken == {}
    flip(run / "step-00000003" / TENSORS, 4000)
    (run / "step-00000002" / MANIFEST).unlink()
    before = sorted(run.rglob("*"))
    found, broken = newest_good(run)
    assert found is not None and found.folder.name == "step-00000001"
    assert list(broken) == [run / "step-00000003", run / "step-00000002"]
    assert TENSORS in broken[run / "step-00000003"]
    assert "is incomplete (no manifest.json)" in broken[run / "step-00000002"]
    assert sorted(run.rglob("*")) == before


def test_one_of_another_version_is_refused_and_not_passed_over(run) -> None:
    """Its sums are right: an older one would lose what this one holds."""
    change_record(run / "step-00000003", lambda record: record.update(format=2))
    with pytest.raises(
        CheckpointError, match=r"step-00000003/state\.json has format 2, but this npt reads 1"
    ):
        newest_good(run)


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no format": (lambda r: r.pop("format"), "has format None"),
    "a step missing": (lambda r: r.pop("step"), "'step' is missing"),
    "a step below zero": (entry("step")(-1), "step is -1"),
    "a fraction of a step": (entry("step")(1.5), "step is 1.5"),
    "a boolean for a step": (entry("step")(True), "step is True"),
    "tokens as text": (entry("tokens")("many\nmore"), "tokens is 'many\\nmore'"),
    "settings that are a list": (entry("settings")([]), "settings is []"),
    "refusals that are no counts": (entry("refused_by_kind")({"data": "x"}), "refused_by_kind is"),
    "refusals below zero": (entry("refused_by_kind")({"data": -1}), "refused_by_kind is"),
    "no position": (entry("position")({}), "position, figures"),
    "a position with an entry too many": (entry("position", "x")(1), "x"),
    "a place of two": (entry("position", "place")([1, 2]), "position"),
    "a place of text": (entry("position", "place")("abc"), "position"),
    "a place below zero": (entry("position", "place")([0, -1, 0]), "-1"),
    "an epoch of text": (entry("position", "epoch")("0"), "'0'"),
    "no figures": (entry("initial")({}), "figures or counts): \"'teacher'\""),
    "figures of text": (entry("initial", "teacher", "kl")("low"), "a figure is not a number"),
    "layers that are a list": (entry("initial", "layers")([]), "items"),
    "a layer without figures": (entry("initial", "layers", "1")({}), "nmse_student"),
    "a best that is text": (entry("best_kl")("0.1"), "best_kl is '0.1'"),
    "a count that is none": (
        entry("counted_from")({"steps": 0}),
        "counted_from.'micro_batches' is missing",
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_an_entry_that_cannot_be_is_refused_and_named(folder, case) -> None:
    change, named = RECORDS[case]
    change_record(folder, change)
    message = refused(folder)
    assert str(folder / RECORD) in message and named in message


def of_some(change: Callable[[torch.Tensor], torch.Tensor], name: str = SOME) -> Callable[..., Any]:
    """Replace one tensor."""
    return lambda t: t.update({name: change(t[name]).contiguous()})


TENSOR_CASES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a moment missing": (lambda t: t.pop(SOME), f"lacks the tensor {SOME!r}"),
    "a stranger": (lambda t: t.update({"../x\n": torch.zeros(1)}), "extra tensor '../x\\n'"),
    "another shape": (of_some(torch.t), f"{SOME} is F32 [2, 128], the model needs F32 [128, 2]"),
    "another dtype": (of_some(torch.Tensor.double), f"{SOME} is F64"),
    "a moment of nothing": (of_some(lambda m: m[:0]), f"{SOME} is F32 [0, 2]"),
    "a step count of two": (
        of_some(lambda _: torch.zeros(2), SOME.replace("exp_avg", "step")),
        "B.up.step is F32 [2], the model needs F32 []",
    ),
    "a NaN": (lambda t: t[SOME].view(-1)[3:4].fill_(math.nan), f"{SOME} has a non-finite value"),
    "no random state": (lambda t: t.pop("rng.0.cpu"), "does not contain tensor rng.0.cpu"),
    "another process": (
        lambda t: t.update({"rng.1.cpu": t["rng.0.cpu"].clone()}),
        "'rng.1.cpu' is not a random state",
    ),
    "a device that is none": (
        lambda t: t.update({"rng.0.tpu": t["rng.0.cpu"].clone()}),
        "'rng.0.tpu'",
    ),
    "a short random state": (
        of_some(lambda r: r[:9], "rng.0.cpu"),
        "'rng.0.cpu' is not a random state",
    ),
    "a random state of zeros": (lambda t: t["rng.0.cpu"].zero_(), "'rng.0.cpu' is not a random"),
    "half a spike guard": (lambda t: t.pop("spikes.norms"), "lacks the tensor 'spikes.norms'"),
    "too many spikes": (
        of_some(lambda _: torch.zeros(129, dtype=torch.float64), "spikes.norms"),
        "F64 [129]",
    ),
    "spikes in fp32": (
        of_some(lambda _: torch.zeros(3), "spikes.norms"),
        "spikes.norms is F32 [3]",
    ),
    "a NaN among the spikes": (
        lambda t: t["spikes.losses"].fill_(math.nan),
        "spikes.losses has a non-finite value",
    ),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_impossible_tensors_are_refused_by_name_and_change_nothing(folder, model, case) -> None:
    change, named = TENSOR_CASES[case]
    change_tensors(folder, change)
    message = refused(folder, model=model)
    assert str(folder / TENSORS) in message and named in message


A = "base_model.model.model.layers.1.npt.A"
ADAPTERS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a tensor missing": (lambda t: t.pop(A), "lacks the tensor"),
    "a tensor too many": (lambda t: t.update(x=torch.zeros(1)), "has the extra tensor 'x'"),
    "a tensor of another shape": (lambda t: t.update({A: torch.zeros(3, 64)}), "[3, 64]"),
    "a NaN": (lambda t: t[A].fill_(math.nan), "non-finite"),
}


ODD = (
    None,
    True,
    -1,
    2**63,
    1e308,
    "",
    "a\nb",
    "../../x",
    "\ud800",
    [],
    {},
    [[2**40, 2**40]],
    "F64",
)


def changed(value: Any, source: random.Random) -> Any:
    """With one value somewhere in it replaced, or left out."""
    if not value or not isinstance(value, dict | list) or source.random() < 0.1:
        return source.choice(ODD)
    made = value.copy()
    key = source.choice(list(made) if isinstance(made, dict) else range(len(made)))
    if source.random() < 0.1:
        del made[key]
    else:
        made[key] = changed(made[key], source)
    return made


@pytest.mark.parametrize("what", ["checkpoint", "bundle"])
def test_files_changed_at_random_are_read_or_refused_in_one_line(what, request, model) -> None:
    """In their bytes, their JSON and the headers of their tensors, the sums made right again."""
    folder = request.getfixturevalue("folder" if what == "checkpoint" else "bundle")
    base, outcomes, source = npt.base_identity(model), set(), random.Random(0)
    before = [p.detach().clone() for p in adapter_parameters(model).values()]
    originals = {p: p.read_bytes() for p in folder.rglob("*.*") if p.suffix != ".md"}
    for path in source.choices(sorted(originals), k=100):
        content = originals[path]
        way, skip = source.random(), 8 if path.suffix == ".safetensors" else 0
        if way < 0.3:
            at, size = source.randrange(len(content)), source.choice((0, 1, 8, len(content)))
            content = content[:at] + source.randbytes(size) + content[at + source.choice((0, 8)) :]
        else:
            end = skip + int.from_bytes(content[:8], "little") if skip else len(content)
            made = json.dumps(changed(json.loads(content[skip:end]), source)).encode()
            content = (len(made).to_bytes(8, "little") if skip else b"") + made + content[end:]
        path.write_bytes(content)
        if what == "checkpoint" and path.name != MANIFEST:
            write_manifest(folder)
        try:
            if what == "checkpoint":
                read_checkpoint(folder).state(model, base)
            else:
                read_student(folder)
            outcomes.add("read")
        except NPTError as error:
            outcomes.add("refused")
            assert str(error).isprintable(), (path, content)
        for each, original in originals.items():
            each.write_bytes(original)
    assert outcomes == {"read", "refused"}
    assert all(map(torch.equal, adapter_parameters(model).values(), before))


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(folder, model, case) -> None:
    change, named = ADAPTERS[case]
    change_tensors(folder, change, "adapter/adapter_model.safetensors")
    assert named in refused(folder, AdapterFileError, model)


def test_another_base_is_refused_by_the_part_that_differs(folder, model) -> None:
    base = npt.base_identity(model)
    other = replace(base, dense="f" * 64)
    checkpoint = read_checkpoint(folder)
    differs = f"unpacked tensors ffffffffffff, expected {base.dense[:12]}"
    with pytest.raises(AdapterFileError, match=rf"another base .*: {differs}; .*--any_base"):
        checkpoint.state(model, other)
    assert checkpoint.state(model, base).step == 3


@pytest.fixture
def no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to a pickle raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was touched")

    for module, names in (
        (torch, ("load", "save")),
        (pickle, ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)


def test_saving_and_resuming_touch_no_pickle(load_model, tmp_path, no_pickle) -> None:
    settings = {"save_steps": 2, "eval_steps": 2, "skip_spikes": True}
    runs = Runs(load_model(), tmp_path, lambda: records(4), settings=settings)
    runs.run("run", max_steps=2)
    assert runs.run("run", resume="auto").steps == 4


def test_a_pickle_in_place_of_tensors_is_not_loaded(folder, model, tmp_path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    for name in (TENSORS, "adapter/adapter_model.safetensors"):
        content = (folder / name).read_bytes()
        torch.save(Trap(), folder / name)
        write_manifest(folder)
        assert name in refused(folder, NPTError, model)
        (folder / name).write_bytes(content)
    assert not (tmp_path / "sprung").exists()
