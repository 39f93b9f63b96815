"""A bundle may come from anywhere: what is not exactly of the form that is written is refused, by
one line that names it.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from resumed_runs import entry
from safetensors.torch import load_file, save_file

from npt.batch import Sample, collate
from npt.errors import AdapterFileError, BundleError, CheckpointError
from npt.forensics.student import batch_of, read_student
from npt.manifest import write_manifest
from npt.runs.checkpoint import read_checkpoint

RECORD, MOMENTS, WINDOW = "postmortem.json", "moments.safetensors", "window.safetensors"
REFUSALS = (BundleError, CheckpointError, AdapterFileError)


def refused(folder: Path, summed: bool = True) -> str:
    """Return the one line that reading it is refused with, at status 5; with sums made right, as
    somebody would who means harm.
    """
    if summed:
        write_manifest(folder)
    with pytest.raises(REFUSALS) as caught:
        read_student(folder)
    message = str(caught.value)
    assert caught.value.exit_status == 5 and "\n" not in message and len(message) < 600
    assert message.isprintable()
    return message


def change_record(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    said = json.loads((folder / RECORD).read_text())
    change(said)
    (folder / RECORD).write_text(json.dumps(said))


def change_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_a_bundle_is_read_with_everything_in_it(bundle) -> None:
    read = read_student(bundle)
    stored = read.postmortem.micro_batches
    assert len(stored) == len(read.postmortem.accepted) == 2
    (((_, index), refusal),) = read.postmortem.recorded.items()
    assert (refusal.kind, refusal.sample_ids, stored[index].tokens) == ("loss", ("bad@0",), 7)
    assert batch_of(stored[index].inputs).tokens == 7 and stored[1 - index].refusal is None
    assert read.postmortem.limits is None and read.entry["samples_at_once"] == 1
    assert read.recipe.quantization == "nf4" and len(read.entry["base_hash"]) == 64
    assert read.config.learning_rate == 1e-2 and read.adapter.rank == 4


def test_a_micro_batch_keeps_every_field() -> None:
    packed = Sample("x", (5, 6, 7, 8), labels=(-100, 6, 7, 8), lengths=(2, 2))
    batch = collate([packed, Sample("y", (9, 3), lengths=(1, 1))], 0)
    read = batch_of(batch.row_tensors)
    assert read.row_tensors.keys() == batch.row_tensors.keys() >= {"documents"}
    assert all(torch.equal(read.row_tensors[n], t) for n, t in batch.row_tensors.items())
    assert read.tokens == batch.tokens and torch.equal(read.valid_index, batch.valid_index)


@pytest.mark.parametrize("version", [2, 3, "guard-1"])
def test_a_bundle_of_an_earlier_version_names_its_npt(bundle, version) -> None:
    change_record(bundle, lambda said: (said.pop("versions"), said.update(version=version)))
    start = f"version {version!r}, but this npt reads 4; replay it with the npt that wrote it"
    assert refused(bundle).endswith(start)  # it does not say which
    change_record(bundle, lambda said: said.update(versions={"npt": "0.1.0"}))
    (bundle / "manifest.json").unlink()
    assert f"{start} ('0.1.0')" in refused(bundle, False)
    change_record(bundle, lambda said: said.pop("version"))
    assert "has no format version, but this npt reads 4;" in refused(bundle, False)


def test_a_bundle_is_no_checkpoint_to_resume_from(bundle) -> None:
    with pytest.raises(CheckpointError, match=r"is a post-mortem, not a checkpoint; .*npt replay"):
        read_checkpoint(bundle)


def test_a_changed_bit_is_found_by_the_sums_of_a_checkpoint(bundle) -> None:
    for path in (path for path in bundle.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert path.name in refused(bundle, False)
        path.write_bytes(content)
    read_student(bundle)


@pytest.mark.parametrize("name", [RECORD, MOMENTS, WINDOW])
def test_a_file_that_is_missing_empty_or_cut_off_is_named(bundle, name) -> None:
    content = (bundle / name).read_bytes()
    for part in (b"", content[:5], content[: len(content) // 2], content[:-1]):
        if part != content[:-1] or name != RECORD:  # the record's last byte is a line break
            (bundle / name).write_bytes(part)
            assert name in refused(bundle)
    (bundle / name).unlink()
    assert name in refused(bundle)
    (bundle / name).mkdir()
    assert name in refused(bundle)
    assert name in refused(bundle, False)


def test_a_folder_that_is_none_is_named(tmp_path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        assert str(folder) in refused(folder, False)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(bundle) -> None:
    (bundle / MOMENTS).unlink()
    os.mkfifo(bundle / MOMENTS)
    assert MOMENTS in refused(bundle, False)


def test_a_pickle_in_place_of_tensors_is_not_loaded(bundle, tmp_path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save(Trap(), bundle / MOMENTS)
    assert MOMENTS in refused(bundle)
    assert not (tmp_path / "sprung").exists()


JSON = {
    "not JSON": ("{", "is damaged or unreadable"),
    "NaN": ('{"format": NaN}', "NaN is not JSON"),
    "an infinity": ('{"format": -Infinity}', "Infinity is not JSON"),
    "not UTF-8": (b"\xff\xfe", "is damaged or unreadable"),
    "a list": ("[]", "holds a list"),
    "nested without end": ("[" * 100_000, "is damaged or unreadable"),
    "a number without end": ('{"format": ' + "9" * 5000 + "}", "is damaged or unreadable"),
    "another version": ('{"version": 5}', "version 5, but this npt reads 4"),
    "no version": ("{}", "has no format version"),
}


@pytest.mark.parametrize("case", JSON)
def test_a_record_that_is_none_is_refused(bundle, case) -> None:
    content, named = JSON[case]
    (bundle / RECORD).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(bundle)
    assert RECORD in message and named in message


def test_a_record_that_is_larger_than_any_is_not_read(bundle) -> None:
    with (bundle / RECORD).open("r+b") as file:
        file.truncate((64 << 20) + 1)
    assert "more than" in refused(bundle)


STUDENT, FIRST = "student", ("micro_batches", 0)

RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an entry missing": (lambda said: said.pop("groups"), "'groups' is missing"),
    "an entry too many": (entry("run\nme")(1), "'run\\nme' is unknown"),
    "a text for a list": (entry("refusals")("none"), "refusals is 'none'"),
    "a refusal of a micro-batch that is a number": (entry(*FIRST, "refusal")(1), "TypeError"),
    "no micro-batch": (entry("micro_batches")([]), "has no refused micro-batch"),
    "one that is a number": (entry("micro_batches")([1]), "TypeError"),
    "more samples than rows": (
        lambda said: said["micro_batches"][0]["sample_ids"].append("x"),
        "a micro-batch of 2 samples does not hold",
    ),
    "tokens that are none": (entry(*FIRST, "tokens")("a"), "ValueError"),
    "rows that are not all there": (
        lambda said: said["micro_batches"][0]["inputs"].pop("labels"),
        "does not hold input_ids, attention_mask",
    ),
    "a tensor that is not there": (entry(*FIRST, "random")({"tensor": "x"}), "KeyError"),
    "a tensor without a name": (entry(*FIRST, "random")({"tensor": []}), "TypeError"),
    "one limit": (entry("spike_limits")([1.0]), "ValueError"),
    "a number of samples that is a text": (
        entry(STUDENT, "samples_at_once")("a"),
        "samples_at_once is 'a'",
    ),
    "a setting that cannot work": (entry(STUDENT, "settings", "batch_size")(0), "batch_size is 0"),
    "a setting of another type": (entry(STUDENT, "settings", "loss")({"a": 1}), "loss"),
    "a setting missing": (
        lambda said: said[STUDENT]["settings"].pop("max_grad_norm"),
        "KeyError: \"'max_grad_norm'\"",
    ),
    "adapters that cannot be": (entry(STUDENT, "adapter", "rank")(0), "rank is 0"),
    "a base that cannot be loaded": (
        entry(STUDENT, "base_loading")(None),
        "cannot load a base like this one",
    ),
}


@pytest.mark.parametrize("case", RECORDS)
def test_an_entry_that_cannot_be_is_refused_and_named(bundle, case) -> None:
    change, named = RECORDS[case]
    change_record(bundle, change)
    message = refused(bundle)
    assert RECORD in message and named in message


def one_more(tensors: dict[str, torch.Tensor]) -> None:
    labels = tensors[f"{ROW}labels"]
    tensors[f"{ROW}labels"] = torch.cat([labels, labels[:, :1]], dim=1)


ROW, ROWS = "refused.0.", ("input_ids", "attention_mask", "position_ids", "labels")

WINDOWS: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "ids of 32 bits": lambda t: t.update({f"{ROW}input_ids": t[f"{ROW}input_ids"].int()}),
    "one dimension": lambda t: t.update({f"{ROW}{n}": t[f"{ROW}{n}"][0] for n in ROWS}),
    "labels of another length": one_more,
}


@pytest.mark.parametrize("case", WINDOWS)
def test_micro_batches_that_cannot_be_are_refused_and_named(bundle, case) -> None:
    change_tensors(bundle / WINDOW, WINDOWS[case])
    message = refused(bundle)
    assert RECORD in message and "does not hold input_ids, attention_mask" in message


@pytest.mark.parametrize("length", [2**63, 2**40, 101 << 20])
def test_a_header_that_claims_to_be_huge_is_refused(bundle, length) -> None:
    for name in (MOMENTS, WINDOW):
        content = (bundle / name).read_bytes()
        (bundle / name).write_bytes(struct.pack("<Q", length) + content[8:])
        assert name in refused(bundle)
        (bundle / name).write_bytes(content)
    write_manifest(bundle)
    read_student(bundle)


@pytest.fixture(scope="module")
def spare(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("spare") / "bundle"


# The bundle is only read and copied, so one for all examples will do.
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from([RECORD, MOMENTS, WINDOW]),
    where=st.floats(0, 1, exclude_max=True),
    byte=st.integers(0, 255),
    cut=st.booleans(),
)
def test_any_changed_or_lost_byte_is_read_or_refused_in_one_line(
    bundle, spare, name, where, byte, cut
) -> None:
    shutil.rmtree(spare, ignore_errors=True)
    shutil.copytree(bundle, spare)
    content = bytearray((spare / name).read_bytes())
    # Half of the changes fall into the first kilobyte or two, where a header is.
    at = int(where * 2 * min(len(content), 2048)) if where < 0.5 else int(where * len(content))
    content[at] = byte
    (spare / name).write_bytes(content[:at] if cut else content)
    write_manifest(spare)
    try:
        read_student(spare)
    except REFUSALS as error:
        assert "\n" not in str(error)
