"""A bundle may come from anywhere: what is not exactly of the form that is written is refused, by
one line that names it.
"""

from __future__ import annotations

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
from safetensors.torch import load_file, save_file

from npt.errors import AdapterFileError, BundleError, CheckpointError
from npt.manifest import write_manifest
from npt.postmortem.bundle import read_bundle
from npt.runs.checkpoint import read_checkpoint

RECORD, STATE, WINDOW = "postmortem.json", "state.safetensors", "window.safetensors"
REFUSALS = (BundleError, CheckpointError, AdapterFileError)


def refused(folder: Path, summed: bool = True) -> str:
    """Return the one line that reading it is refused with, at status 5; with sums made right, as
    somebody would who means harm.
    """
    if summed:
        write_manifest(folder)
    with pytest.raises(REFUSALS) as caught:
        read_bundle(folder)
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
    read = read_bundle(bundle)
    assert len(read.window) == len(read.accepted) == 2
    assert [r.kind for r in read.refusals] == ["loss"] and read.refusals[0].sample_ids == ("bad@0",)
    assert read.window[read.refusals[0].micro_batch or 0].tokens == 7
    assert read.limits is None and read.rate > 0 and set(read.random_state) >= {"cpu"}
    assert read.samples_at_once == 1
    assert read.base.quantization == "nf4" and len(read.base.hash) == 64


def test_a_bundle_of_the_first_version_names_its_npt(bundle) -> None:
    change_record(bundle, lambda said: (said.pop("version"), said.update(format=1)))
    assert "is of version 1, this npt reads 2; replay it with the npt that wrote it" in refused(
        bundle
    )
    change_record(bundle, lambda said: said.update(versions={"npt": "0.1.0"}))
    for name in ("manifest.json", "state.json"):  # which it did not have
        (bundle / name).unlink()
    assert "is of version 1, this npt reads 2; replay it with npt '0.1.0'" in refused(bundle, False)


def test_a_bundle_is_no_checkpoint_to_resume_from(bundle) -> None:
    with pytest.raises(
        CheckpointError, match="is a post-mortem; name a checkpoint, or `npt replay`"
    ):
        read_checkpoint(bundle)


def test_a_changed_bit_is_found_by_the_sums_of_a_checkpoint(bundle) -> None:
    for path in (path for path in bundle.rglob("*") if path.is_file() and path.name != RECORD):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert path.name in refused(bundle, False)
        path.write_bytes(content)
    read_bundle(bundle)


@pytest.mark.parametrize("name", [RECORD, STATE, WINDOW])
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
    (bundle / STATE).unlink()
    os.mkfifo(bundle / STATE)
    assert STATE in refused(bundle, False)


def test_a_pickle_in_place_of_tensors_is_not_loaded(bundle, tmp_path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save(Trap(), bundle / STATE)
    assert STATE in refused(bundle)
    assert not (tmp_path / "sprung").exists()


JSON = {
    "not JSON": ("{", "cannot be read"),
    "NaN": ('{"format": NaN}', "NaN is not JSON"),
    "an infinity": ('{"format": -Infinity}', "Infinity is not JSON"),
    "not UTF-8": (b"\xff\xfe", "cannot be read"),
    "a list": ("[]", "holds a list"),
    "nested without end": ("[" * 100_000, "cannot be read"),
    "a number without end": ('{"format": ' + "9" * 5000 + "}", "cannot be read"),
    "another version": ('{"version": 3}', "of version 3, this npt reads 2"),
    "no version": ("{}", "of version None"),
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


def entry(*path: str) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """`entry("a", "b")(value)` sets said["a"]["b"]."""

    def to(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(said: dict[str, Any]) -> None:
            for key in path[:-1]:
                said = said[key]
            said[path[-1]] = value

        return change

    return to


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a negative number of samples": (entry("samples_at_once")(-1), "samples_at_once is [-1]"),
    "an entry missing": (lambda said: said.pop("base"), "'base' is missing"),
    "an entry too many": (entry("run\nme")(1), "'run\\nme' is unknown"),
    "a boolean for a number": (entry("samples_at_once")(True), "samples_at_once is True"),
    "a text for a rate": (entry("schedule", "next_rate")("1"), "schedule.next_rate is ['1']"),
    "a negative rate": (entry("schedule", "next_rate")(-0.5), "schedule.next_rate is [-0.5]"),
    "a setting that cannot work": (entry("settings", "batch_size")(0), "batch_size is 0"),
    "a setting of another type": (entry("settings", "loss")({"a": 1}), "loss"),
    "a text for a list": (entry("refusals")("none"), "refusals is 'none'"),
    "a refusal that is a number": (entry("refusals")([1]), "refusals has the entry 1"),
    "sample ids that are numbers": (entry("sample_ids")([[1], [2]]), "expected a list of names"),
    "no micro-batch": (entry("sample_ids")([]), "names no micro-batch"),
    "more micro-batches than there are": (
        lambda said: (said["sample_ids"].append(["x"]), said["offsets"].append(0)),
        "lacks the tensor '2.",
    ),
    "more samples than rows": (
        lambda said: said["sample_ids"][0].append("x"),
        "1 rows, but 2 samples",
    ),
    "a setting missing": (
        lambda said: said["settings"].pop("max_grad_norm"),
        "max_grad_norm is missing",
    ),
    "an infinite next rate": (entry("schedule", "next_rate")(1e999), "is not JSON"),
    "one limit": (entry("spike_limits")([1.0]), "expected 2 numbers"),
    "a limit that is a text": (entry("spike_limits")([1.0, "2"]), "expected 2 numbers"),
    "a dtype that is none": (entry("base", "dtype")("float8"), "base.dtype is 'float8'"),
    "a precision that is none": (
        entry("base", "matmul_precision")("low"),
        "base.matmul_precision is 'low'",
    ),
    "a finding that is a number": (entry("findings", "base")(1), "findings.base is 1"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_an_entry_that_cannot_be_is_refused_and_named(bundle, case) -> None:
    change, named = RECORDS[case]
    change_record(bundle, change)
    message = refused(bundle)
    assert RECORD in message or WINDOW in message
    assert named in message


def one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors["0.labels"] = torch.cat([tensors["0.labels"], tensors["0.labels"][:, :1]], dim=1)


WINDOWS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a tensor missing": (lambda t: t.pop("1.labels"), "lacks the tensor '1.labels'"),
    "a tensor too many": (
        lambda t: t.update({"../2.input_ids": torch.zeros(1)}),
        "has the extra tensor '../2.input_ids'",
    ),
    "ids of 32 bits": (
        lambda t: t.update({"0.input_ids": t["0.input_ids"].int()}),
        "0.input_ids is I32",
    ),
    "ids that are fractions": (
        lambda t: t.update({"0.input_ids": t["0.input_ids"].double()}),
        "0.input_ids is F64",
    ),
    "one dimension": (
        lambda t: t.update(
            {
                f"0.{n}": t[f"0.{n}"][0]
                for n in ("input_ids", "attention_mask", "position_ids", "labels")
            }
        ),
        "[B, T]",
    ),
    "no column": (
        lambda t: t.update(
            {
                f"0.{n}": t[f"0.{n}"][:, :0]
                for n in ("input_ids", "attention_mask", "position_ids", "labels")
            }
        ),
        "[1, 0]",
    ),
    "labels of another length": (one_more, "0.labels is I64"),
    "a mask of twos": (
        lambda t: t["0.attention_mask"].mul_(2),
        "0.attention_mask holds numbers outside [0, 2)",
    ),
    "a negative position": (
        lambda t: t["accepted.0.position_ids"].sub_(1),
        "accepted.0.position_ids holds numbers outside",
    ),
    "a position far away": (
        lambda t: t["0.position_ids"].add_(2**40),
        "0.position_ids holds numbers outside",
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_micro_batches_that_cannot_be_are_refused_and_named(bundle, case) -> None:
    change, named = WINDOWS[case]
    change_tensors(bundle / WINDOW, change)
    message = refused(bundle)
    assert WINDOW in message and named in message


STATES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "no random state": (lambda t: t.pop("rng.0.cpu"), "random states of the processes []"),
    "a short random state": (
        lambda t: t.update({"rng.0.cpu": t["rng.0.cpu"][:100]}),
        "'rng.0.cpu', U8 [100]",
    ),
    "a random state of zeros": (lambda t: t["rng.0.cpu"].zero_(), "rng.0.cpu is no random state"),
    "a device that is none": (
        lambda t: t.update({"rng.0.cuda.x": torch.zeros(16, dtype=torch.uint8)}),
        "'rng.0.cuda.x'",
    ),
    "a process too many": (lambda t: t.update({"rng.a\nb.cpu": torch.zeros(1)}), "'a\\nb'"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_cannot_be_is_refused_and_named(bundle, case) -> None:
    change, named = STATES[case]
    change_tensors(bundle / STATE, change)
    message = refused(bundle)
    assert STATE in message and named in message


@pytest.mark.parametrize("length", [2**63, 2**40, 101 << 20])
def test_a_header_that_claims_to_be_huge_is_refused(bundle, length) -> None:
    for name in (STATE, WINDOW):
        content = (bundle / name).read_bytes()
        (bundle / name).write_bytes(struct.pack("<Q", length) + content[8:])
        assert name in refused(bundle)
        (bundle / name).write_bytes(content)
    write_manifest(bundle)
    read_bundle(bundle)


@pytest.fixture(scope="module")
def spare(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("spare") / "bundle"


# The bundle is only read and copied, so one for all examples will do.
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from([RECORD, STATE, WINDOW]),
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
        read_bundle(spare)
    except REFUSALS as error:
        assert "\n" not in str(error)
