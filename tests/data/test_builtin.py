import os
from pathlib import Path

import pytest

from npt.batch import is_heldout
from npt.data.readers import builtin_files
from npt.errors import DataError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library: 40 modules, a package, and what must be left out."""
    for number in range(40):
        (tmp_path / f"module{number:02}.py").write_text(f"value = {number}\n")
    left_out = ("json/tests", "test", "site-packages/other", "__pycache__", "pip/_vendor")
    for folder in ("json", *left_out):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(20):  # enough that some of each would be held out
            (tmp_path / folder / f"inner{number:02}.py").write_text("inner = 1\n")
    (tmp_path / "notes.txt").write_text("not Python")
    (tmp_path / "blank.py").write_text(" \n\n")
    (tmp_path / "latin.py").write_bytes("é = 1\n".encode("latin-1"))
    return tmp_path


def paths(split: str, root: Path | None = None) -> list[str]:
    return [path for path, _ in builtin_files(split, root)]


def test_the_same_files_are_held_out_for_good():
    """The embedded model was trained on the others: a file that changed sides would leak into its
    evaluation.
    """
    held = ["ast.py", "http/client.py", "types.py", "enum.py"]
    names = [*held, "os.py", "json/decoder.py", "typing.py", "inspect.py", "abc.py", "dis.py"]
    assert [name for name in names if is_heldout(name)] == held


def test_one_file_in_twenty_is_held_out():
    share = sum(is_heldout(f"{number}.py") for number in range(4000)) / 4000
    # four standard errors of a share of 1/20 among 4000
    assert share == pytest.approx(1 / 20, abs=0.014)


def test_the_splits_are_disjoint_and_together_all_the_source(library):
    train, heldout = paths("train", library), paths("heldout", library)
    assert train and heldout
    expected = {f"module{number:02}.py" for number in range(40)} | {
        f"json/inner{number:02}.py" for number in range(20)
    }
    assert sorted(train + heldout) == sorted(expected)
    assert all(is_heldout(path) for path in heldout)
    assert not any(is_heldout(path) for path in train)


def test_folders_that_are_left_out_are_not_entered(library, monkeypatch):
    """Of installed packages there may be a hundred times as many files as of the library."""
    entered, scandir = [], os.scandir
    monkeypatch.setattr(
        os,
        "scandir",
        lambda folder: (
            entered.append(Path(folder).relative_to(library).as_posix()) or scandir(folder)
        ),
    )
    assert paths("train", library)
    assert sorted(entered) == [".", "json", "pip"]


def test_a_python_without_source_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(DataError, match=r"no Python source in .*--dataset_name FILE") as refusal:
        list(builtin_files("train", tmp_path))
    assert str(tmp_path) in str(refusal.value)
