"""The cache of converted files: written once, by one process, whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from gguf_files import made_model, write_gguf

import npt
from npt.base.gguf import cache as module
from npt.base.gguf.cache import cache_folder, converted, place_of

FORK = multiprocessing.get_context("fork")


def test_a_file_is_converted_once(tmp_path, monkeypatch) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    folder = converted(file)
    monkeypatch.setattr(module, "convert", lambda *_: pytest.fail("converted again"))
    assert converted(file) == folder and npt.load_base(str(file))
    shutil.copy2(file, tmp_path / "b.gguf")
    assert place_of(tmp_path / "b.gguf").name.removeprefix("b-") == folder.name.removeprefix("a-")


def test_a_file_that_changed_is_another(tmp_path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    first, found = place_of(file), file.stat()
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert place_of(file) != first
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert place_of(file) != first  # of the same size and time


def test_a_changed_beginning_is_seen_whole(tmp_path, monkeypatch) -> None:
    """It holds the metadata and the vocabulary."""
    file = write_gguf(tmp_path / "a.gguf")
    monkeypatch.setattr(module, "_SAMPLES", 0)
    monkeypatch.setattr(module, "_ENDS", 5000)
    first, found, content = place_of(file), file.stat(), bytearray(file.read_bytes())
    content[4321] ^= 1
    file.write_bytes(bytes(content))
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert place_of(file) != first


def test_the_cache_lies_where_the_environment_says(monkeypatch) -> None:
    monkeypatch.setenv("NPT_CACHE", "/own")
    assert cache_folder() == Path("/own/gguf")
    monkeypatch.delenv("NPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/npt/gguf")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "npt" / "gguf"


def _convert_slowly(file: Path, note: Path) -> None:
    convert = module.convert

    def slow(*arguments):
        with note.open("a") as stream:
            stream.write("x")
        time.sleep(0.2)
        return convert(*arguments)

    module.convert = slow
    converted(file)


def test_of_two_processes_one_writes(tmp_path) -> None:
    file, note = write_gguf(tmp_path / "a.gguf", made_model()), tmp_path / "note"
    both = [FORK.Process(target=_convert_slowly, args=(file, note)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert note.read_text() == "x" and place_of(file).is_dir()


def _die_while_saving(file: Path) -> None:
    from npt.base.gguf import convert

    def die(tensors, path, **_):
        Path(path).write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)

    convert.save_file = die
    converted(file)


def test_a_killed_process_leaves_nothing_that_is_loaded(tmp_path, cache) -> None:
    file = write_gguf(tmp_path / "a.gguf", made_model())
    process = FORK.Process(target=_die_while_saving, args=(file,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [path.suffix for path in cache.iterdir()] == [".partial"]
    npt.load_base(str(file))
    assert list(cache.iterdir()) == [place_of(file)]
