"""Files that may come from anybody: bounded, never a pickle, and whatever is wrong with one is a
line that names it.
"""

import os
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from npt.errors import BundleError
from npt.forensics.bundle import read_postmortem
from npt.stored import (
    check_entries,
    check_names,
    described,
    read_headers,
    read_json,
    read_tensors,
    shown,
)


def refused(path: Path, read: Any = read_json) -> str:
    with pytest.raises(BundleError) as caught:
        read(path, BundleError)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is damaged or unreadable"),
        (b"{", "is damaged or unreadable"),
        (b"[1]", "holds a list, not an object"),
        (b"3", "holds an int"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"\xff{}", "is damaged or unreadable"),
        (b"[" * 100_000, "is damaged or unreadable"),
        (b'{"a":' * 100_000, "is damaged or unreadable"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has too many digits"),
    ],
)
def test_what_is_no_object_in_strict_json_is_refused_and_named(tmp_path, content, named) -> None:
    (tmp_path / "x.json").write_bytes(content)
    message = refused(tmp_path / "x.json")
    assert str(tmp_path / "x.json") in message and named in message


def test_an_object_is_read_as_it_stands(tmp_path) -> None:
    (tmp_path / "x.json").write_text(
        '{"a": [1, 2.5, null, true, "\\u00e9"], "b": 18446744073709551615}', encoding="utf-8"
    )
    assert read_json(tmp_path / "x.json", BundleError) == {
        "a": [1, 2.5, None, True, "é"],
        "b": 2**64 - 1,
    }


@pytest.mark.parametrize("read", [read_json, read_headers])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, read) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("missing", "folder", "pipe"):
        assert name in refused(tmp_path / name, read)
    assert "/dev/zero" in refused(Path("/dev/zero"), read)


def test_a_json_file_larger_than_any_is_not_read(tmp_path) -> None:
    with (tmp_path / "x.json").open("w") as stream:
        stream.truncate((64 << 20) + 1)
    assert "67108865 bytes, more than the limit of 67108864" in refused(tmp_path / "x.json")


def test_headers_are_read_without_the_tensors(tmp_path) -> None:
    (tmp_path / "x").write_bytes(
        save({"a": torch.zeros(2, 3), "b": torch.tensor(1.5, dtype=torch.float64)})
    )
    assert read_headers(tmp_path / "x", BundleError) == {"a": ("F32", (2, 3)), "b": ("F64", ())}
    assert read_tensors(tmp_path / "x", ["b"], BundleError) == {
        "b": torch.tensor(1.5, dtype=torch.float64)
    }
    with pytest.raises(BundleError, match="is damaged or unreadable"):
        read_tensors(tmp_path / "x", ["c"], BundleError)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1), st.booleans())
def test_any_safetensors_file_is_read_or_refused_in_one_line(
    tmp_path_factory, content, length, short
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(struct.pack("<Q", len(content) if short else length) + content)
    try:
        headers = read_headers(path, BundleError)
        read_tensors(path, headers, BundleError)
    except BundleError as error:
        assert "\n" not in str(error)


WANTED: dict[str, tuple[type, ...]] = {"a": (int,), "b": (str, type(None)), "c": (bool,)}


@pytest.mark.parametrize(
    ("changed", "exact", "message"),
    [
        ({}, True, None),
        ({"b": None}, True, None),
        ({"more": []}, False, None),
        ({"b": ...}, True, "the entry deep.'b' is missing (1 in all)"),
        ({"b": ..., "d": 1}, False, "the entry deep.'b' is missing (1 in all)"),
        ({"x\ny": 1}, True, "the entry deep.'x\\ny' is unknown (1 in all)"),
        ({"a": "x"}, True, "deep.a is 'x', expected int"),
        ({"a": True}, True, "deep.a is True, expected int"),
        ({"b": 3}, True, "deep.b is 3, expected str or null"),
        ({"c": 1}, True, "deep.c is 1, expected bool"),
    ],
)
def test_an_entry_that_is_missing_unknown_or_of_another_type_is_named(
    changed, exact, message
) -> None:
    entries = {"a": 1, "b": "x", "c": True, **changed}
    entries = {name: value for name, value in entries.items() if value is not ...}
    with nullcontext() if message is None else pytest.raises(BundleError) as caught:
        check_entries(Path("x.json"), "deep.", entries, WANTED, BundleError, exact)
    assert message is None or message in str(caught.value)


def test_wrong_tensor_names_are_counted_and_the_first_is_named() -> None:
    check_names(Path("x"), ["b", "a"], ["a", "b"], BundleError)
    with pytest.raises(BundleError, match=r"x lacks the tensor 'b' \(2 in all\)"):
        check_names(Path("x"), ["a"], ["a", "b", "c"], BundleError)
    with pytest.raises(BundleError, match=r"x has the extra tensor '\.\./c' \(1 in all\)"):
        check_names(Path("x"), ["a", "../c"], ["a"], BundleError)


@pytest.mark.parametrize(
    "value", ["x" * 1000, "a\nb", "\ud800", {"deep": list(range(1000))}, None, 1e308]
)
def test_whatever_is_shown_is_short_and_on_one_line(value) -> None:
    text = shown(value)
    assert len(text) <= 80 and text.isprintable()
    text.encode()


def test_a_header_is_described_by_dtype_and_shape() -> None:
    assert described(("F32", (2, 3))) == "F32 [2, 3]" and described(("X\n", ())) == "X\\n []"


def test_a_folder_that_is_missing_is_not_said_to_lack_a_file(tmp_path) -> None:
    (tmp_path / "file").touch()
    for name, words in (("gone", "there is no folder {}"), ("file", "{} is not a folder")):
        path = tmp_path / name
        message = refused(path, lambda where, _: read_postmortem(where))
        assert message.startswith(f"{words.format(path)}: pass a ")
    assert refused(tmp_path, lambda where, _: read_postmortem(where)).startswith(
        f"{tmp_path} has no post"
    )
