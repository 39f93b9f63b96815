import json
import math
import os
import shutil
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npt import files
from npt.errors import ConfigError
from npt.files import (
    check_file,
    check_folder,
    clean,
    finite_or_null,
    new_folder,
    remove_folder,
    to_json,
    write_bytes,
    write_json,
    write_text,
)

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3),
    max_leaves=10,
)
MODES = pytest.mark.parametrize(
    ("umask", "file_mode", "folder_mode"),
    [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)],
)


@pytest.fixture
def under_umask():
    """Sets the umask for the test and puts the old one back."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def equal_but_for_null(one, other) -> bool:
    if isinstance(one, float) and not math.isfinite(one):
        return other is None
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            equal_but_for_null(one[key], other[key]) for key in one
        )
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal_but_for_null, one, other))
    return type(one) is type(other) and one == other


class TestJson:
    @settings(deadline=None, max_examples=150)
    @given(VALUES, st.sampled_from([None, 2]))
    def test_is_standard_and_gives_back_all_but_the_non_finite(self, value, indent):
        def no_constant(name):
            raise AssertionError(f"{name} is not JSON")

        assert equal_but_for_null(
            value, json.loads(to_json(value, indent=indent), parse_constant=no_constant)
        )

    def test_non_finite_numbers_become_null_at_any_depth(self):
        value = {"a": float("nan"), "b": [1.5, (float("inf"), {"c": -float("inf")})]}
        assert finite_or_null(value) == {"a": None, "b": [1.5, [None, {"c": None}]]}
        assert to_json(value) == '{"a": null, "b": [1.5, [null, {"c": null}]]}'

    def test_a_file_of_it_ends_with_a_newline(self, tmp_path):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
        assert (tmp_path / "x.json").read_text() == '{\n  "loss": null\n}\n'


def test_bytes_come_back_as_they_were_and_replace_the_file(tmp_path):
    path = tmp_path / "x.png"
    for content in (b"\x89PNG\r\n\x1a\n\x00\xff longer", bytes(range(256)), b""):
        write_bytes(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


class TestWriteText:
    @MODES
    def test_file_mode_follows_the_umask(
        self, tmp_path, under_umask, umask, file_mode, folder_mode
    ):
        under_umask(umask)
        write_text(tmp_path / "x.txt", "text")
        assert mode(tmp_path / "x.txt") == file_mode
        assert under_umask(0o022) == umask  # looking at the umask must not change it

    @pytest.mark.parametrize(
        "error",
        [OSError(28, "No space left on device"), KeyboardInterrupt()],
        ids=["disk full", "interrupted"],
    )
    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_failure_leaves_the_old_file_and_no_other(self, tmp_path, monkeypatch, step, error):
        path = tmp_path / "x.txt"
        write_text(path, "old")

        def fail(*_):
            raise error

        monkeypatch.setattr(files.os, step, fail)
        with pytest.raises(type(error)):
            write_text(path, "new")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_is_on_disk_before_it_takes_the_name(self, tmp_path, monkeypatch):
        order, order_of = [], ["fsync", "replace"]
        for name in order_of:
            original = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, n=name, f=original: (order.append(n), f(*a)))
        write_text(tmp_path / "x.txt", "text")
        assert order[:2] == order_of


class TestNewFolder:
    def fill(self, folder: Path, text: str) -> None:
        (folder / "a.txt").write_text(text)
        (folder / "deep").mkdir()
        (folder / "deep" / "b.txt").write_text(text)

    def content(self, folder: Path) -> dict[str, str]:
        return {
            p.relative_to(folder).as_posix(): p.read_text()
            for p in folder.rglob("*")
            if p.is_file()
        }

    def test_appears_as_a_whole_when_the_block_ends(self, tmp_path):
        path = tmp_path / "new" / "folder"
        with new_folder(path) as temporary:
            self.fill(temporary, "one")
            assert not path.exists()
            # the same file system, so that a rename is enough
            assert temporary.parent == path.parent
        assert self.content(path) == {"a.txt": "one", "deep/b.txt": "one"}
        assert list(path.parent.iterdir()) == [path]

    @pytest.mark.parametrize(
        "error", [ValueError("inside"), KeyboardInterrupt()], ids=["exception", "interrupted"]
    )
    @pytest.mark.parametrize("existing", [True, False])
    def test_a_block_that_fails_changes_nothing(self, tmp_path, existing, error):
        path = tmp_path / "folder"
        if existing:
            path.mkdir()
            self.fill(path, "old")
        with pytest.raises(type(error)), new_folder(path) as temporary:
            self.fill(temporary, "new")
            raise error
        assert path.exists() == existing
        assert not existing or self.content(path) == {"a.txt": "old", "deep/b.txt": "old"}
        assert [p.name for p in tmp_path.iterdir()] == (["folder"] if existing else [])

    @pytest.mark.parametrize("rename", [1, 2])
    def test_a_rename_that_fails_leaves_the_old_folder_in_its_place(
        self, tmp_path, monkeypatch, rename
    ):
        path = tmp_path / "folder"
        path.mkdir()
        self.fill(path, "old")
        replace, calls = os.replace, []

        def fail_once(*paths):
            calls.append(paths)
            if len(calls) == rename:
                raise OSError(5, "Input/output error")
            return replace(*paths)

        monkeypatch.setattr(files.os, "replace", fail_once)
        with pytest.raises(OSError, match="Input/output"), new_folder(path) as temporary:
            (temporary / "only.txt").write_text("new")
        assert path.is_dir()
        assert self.content(path) == {"a.txt": "old", "deep/b.txt": "old"}

    @MODES
    def test_modes_follow_the_umask_at_every_depth(
        self, tmp_path, under_umask, umask, file_mode, folder_mode
    ):
        under_umask(umask)
        with new_folder(tmp_path / "folder") as temporary:
            self.fill(temporary, "text")
            (temporary / "a.txt").chmod(0o600)  # as safetensors leaves its files
        folder = tmp_path / "folder"
        assert {mode(p) for p in (folder, folder / "deep")} == {folder_mode}
        assert {mode(p) for p in (folder / "a.txt", folder / "deep" / "b.txt")} == {file_mode}
        assert under_umask(0o022) == umask

    @pytest.fixture
    def synced(self, monkeypatch) -> list[Path]:
        """The files and folders that are synced, in their order."""
        paths = []
        opened = "/proc/self/fd/{}".format
        monkeypatch.setattr(os, "fsync", lambda file: paths.append(Path(os.readlink(opened(file)))))
        return paths

    def test_every_file_is_on_disk_before_the_folder_takes_its_name(
        self, tmp_path, monkeypatch, synced
    ):
        at_rename, replace = [], os.replace
        monkeypatch.setattr(
            files.os, "replace", lambda *paths: (at_rename.extend(synced), replace(*paths))
        )
        with new_folder(tmp_path / "folder") as temporary:
            self.fill(temporary, "text")
        assert {"a.txt", "deep", "b.txt"} <= {path.name for path in at_rename}

    def test_the_folders_above_that_had_to_be_made_are_synced_too(self, tmp_path, synced):
        with new_folder(tmp_path / "a" / "b" / "c"):
            pass
        assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(synced)

    def test_a_process_killed_at_any_moment_leaves_one_whole_folder(self, tmp_path, monkeypatch):
        place, seen = tmp_path / "place", []
        remove, copy = shutil.rmtree, tmp_path / "copy"

        def look(original):
            def looking(*arguments, **more):
                shutil.copytree(place, copy)
                with monkeypatch.context() as patch:
                    patch.setattr(files.os, "replace", replace)
                    patch.setattr(files.shutil, "rmtree", remove)
                    clean(copy)
                assert [item.name for item in copy.iterdir()] == ["folder"]
                seen.append(self.content(copy / "folder")["a.txt"])
                remove(copy)
                return original(*arguments, **more)

            return looking

        for text in ("one", "two"):
            with new_folder(place / "folder") as temporary:
                self.fill(temporary, text)
                if text == "two":
                    replace = os.replace
                    monkeypatch.setattr(files.os, "replace", look(os.replace))
                    monkeypatch.setattr(files.shutil, "rmtree", look(remove))
        assert seen == ["one", "one", "two"]
        assert self.content(place / "folder") == {"a.txt": "two", "deep/b.txt": "two"}
        assert [item.name for item in place.iterdir()] == ["folder"]


class TestClean:
    def names(self, folder: Path) -> set[str]:
        return {p.name for p in folder.iterdir()}

    def test_removes_what_was_half_written_and_nothing_else(self, tmp_path):
        kept = {
            ".mine",
            ".folder.partial",
            "folder.abcdefgh.partial",
            ".folder.ABCDEFGH.partial",
            ".a.12345678.other",
            "step-1",
        }
        for name in kept:
            (tmp_path / name).touch()
        (tmp_path / ".file.json.abcd1234.partial").touch()
        (tmp_path / ".folder.abcdefg_.partial" / "deep").mkdir(parents=True)
        (tmp_path / ".link.abcdefgh.partial").symlink_to(tmp_path)
        clean(tmp_path)
        assert self.names(tmp_path) == kept

    @pytest.mark.parametrize("successor", [True, False])
    def test_puts_back_what_was_to_be_replaced_and_was_not(self, tmp_path, successor):
        old = tmp_path / ".folder.abcdefgh.old"
        old.mkdir()
        (old / "a").write_text("old")
        if successor:
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder" / "a").write_text("new")
        clean(tmp_path)
        assert self.names(tmp_path) == {"folder"}
        assert (tmp_path / "folder" / "a").read_text() == ("new" if successor else "old")


def test_a_removed_folder_is_gone_as_a_whole(tmp_path):
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    remove_folder(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        remove_folder(tmp_path / "folder")


def test_what_is_no_regular_file_is_never_replaced(tmp_path) -> None:
    """As root, a rename onto /dev/null would leave the machine without one."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    file.write_text("kept")
    for path in (pipe, link, tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            write_bytes(path, b"x")
    with pytest.raises(OSError, match="not a folder"), new_folder(file):
        pass
    assert stat.S_ISFIFO(pipe.stat().st_mode) and link.is_symlink() and file.read_text() == "kept"
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]


def test_a_place_for_an_output_is_checked_and_left_as_it_was(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("content")
    check_file(Path("old"), "--output")
    check_file(Path("a/b/new"), "--output", parents=True)
    check_folder(Path("a/b/new"), "--output", empty=True)
    check_folder(Path("."), "--output_dir", in_place=True)
    for path, problem in {
        "/dev/null": "is not a regular file: name another file",
        "/proc/new": "cannot be written: No such file or directory; choose another place",
        "null\0": "cannot be written: embedded null byte; choose another place",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            check_file(Path(path), "--output")
    for path in (".", "..", "/"):  # new_folder would rename them
        with pytest.raises(ConfigError, match="cannot be replaced as a whole: name a folder in it"):
            check_folder(Path(path), "--output")
    with pytest.raises(ConfigError, match=r"--output new cannot be written: No space left .*free"):
        check_folder(Path("new"), "--output", size=2**62)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
