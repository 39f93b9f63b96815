"""The benchmark on a real language model, on the embedded one: documents, rows and their file."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import npt
import real
from npt.adapters.converted import npt_layers
from npt.batch import is_heldout
from npt.console import silent_console
from npt.errors import DataError
from real import ROWS, Bench
from real_text import Document, divided, read_text, token_count

WORDS = ("the", "token", "of", "a", "layer", "is", "fed", "into", "and", "state", "comes", "out")


def prose(number: int, words: int = 120) -> str:
    """Return a text like no other."""
    return " ".join(
        WORDS[(i * (number + 3) + i // 7) % len(WORDS)] + str(number) for i in range(words)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two dozen documents."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(24):
        (folder / f"{number}.txt").write_text(prose(number), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def base():
    return npt.load_base("tiny", quantization="nf4", device="cpu")


@pytest.fixture(scope="module")
def text(folder, base):
    sizes = {"length": 64, "heldout_tokens": 256, "choosing_tokens": 128}
    return read_text(str(folder), base[1], base[0].config.vocab_size, **sizes)


@pytest.fixture(scope="module")
def bench(base, text):
    return Bench("tiny", *base, text, tokens=512, console=silent_console())


class TestDocuments:
    def test_the_three_parts_share_no_document(self, text):
        parts = [
            {s.id.partition("@")[0] for s in part}
            for part in (text.fitted, text.choosing, text.heldout)
        ]
        assert all(len(part) >= 2 for part in parts)
        assert len(set.union(*parts)) == sum(map(len, parts)) == 24
        assert token_count(text.heldout) == 256
        for part in (text.heldout, text.choosing):  # one sample of each document
            assert len({s.id.partition("@")[0] for s in part}) == len(part)

    def test_a_text_that_occurs_twice_is_one_document(self, folder, base, tmp_path):
        for number in range(24):
            content = (folder / f"{number}.txt").read_text()
            (tmp_path / f"{number}.txt").write_text(content)
            (tmp_path / f"copy-{number}.txt").write_text(content)
        found = read_text(str(tmp_path), base[1], 2048, length=64, heldout_tokens=256)
        samples = [s.input_ids for s in (*found.fitted, *found.choosing, *found.heldout)]
        assert len(samples) == len(set(samples))

    def test_articles_and_paragraphs_of_one_file_are_documents(self):
        articles = "".join(f" = Title {n} = \n\n{prose(n)}\n\n = = Part = = \n" for n in range(9))
        found = divided(Document("wiki", articles))
        assert [d.name for d in found] == [f"wiki: Title {n}" for n in range(9)]
        assert "".join(d.text for d in found) == articles
        plain = "\n\n".join(prose(n) for n in range(60))
        blocks = divided(Document("plain", plain))
        assert len(blocks) > 3 and all(len(d.text) >= 8000 for d in blocks[:-1])
        assert " ".join(" ".join(d.text for d in blocks).split()) == " ".join(plain.split())

    def test_held_out_documents_of_a_source_are_measured_on(self, base, short_library):
        sizes = {"length": 32, "heldout_tokens": 64, "choosing_tokens": 64}
        found = read_text("builtin", base[1], 2048, **sizes)
        assert all(is_heldout(s.id.partition("@")[0]) for s in found.heldout)
        assert not any(is_heldout(s.id.partition("@")[0]) for s in (*found.fitted, *found.choosing))

    def test_too_little_text_is_one_line(self, base, tmp_path):
        (tmp_path / "a.txt").write_text(prose(0))
        with pytest.raises(DataError, match=r"--text .* has 1 documents"):
            read_text(str(tmp_path / "a.txt"), base[1], 2048)
        (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
        with pytest.raises(DataError, match="record 0 has no 'text'"):
            read_text(str(tmp_path / "b.jsonl"), base[1], 2048)


class TestRows:
    def test_the_adapters_that_were_nearest_are_measured(self, bench, text):
        before = npt.base_hash(bench.model)
        training = {**ROWS["best"].training, "learning_rate": 10.0, "max_steps": 4}
        row = replace(ROWS["best"], divisor=48, layers="7", training=training)
        made = replace(bench, text=replace(text, heldout=text.choosing)).make(row)
        assert made["trained"]["steps"] == 4 and made["minutes"] > 0
        # batches of another size are rounded otherwise
        assert made["figures"]["kl"] == pytest.approx(made["trained"]["choosing_kl"], rel=1e-4)
        assert not npt_layers(bench.model) and npt.base_hash(bench.model) == before

    def test_a_student_is_measured_again_with_rounded_codes(self, bench):
        row = replace(real.named("0/4/4"), layers="6-7", steps=(1e-6, 0.3))
        made = bench.make(row)
        fine, coarse = made["rounded"]
        assert fine["figures"]["kl"] == pytest.approx(made["figures"]["kl"], rel=1e-3)
        assert coarse["figures"]["kl"] > 1.1 * made["figures"]["kl"]
        assert fine["bits"] > coarse["bits"] > 0 and list(coarse["bits_by_layer"]) == [6, 7]
        # the model is as it was
        assert not npt_layers(bench.model)


def test_a_row_is_named_by_its_sizes(base):
    form = real.named("16/4/8").config(base[0].config)
    assert (form.active, form.rank, form.token_rank) == (12, 48, 24)
    assert real.named("0/16/0").config(base[0].config) == ROWS["start-small"].config(base[0].config)


ARGUMENTS = ["--model", "tiny", "--length", "64", "--heldout_tokens", "256"]
ARGUMENTS += ["--choosing_tokens", "128", "--tokens", "512", "--steps", "1"]


class TestCommand:
    def test_rows_are_made_and_others_of_the_file_stay(self, folder, base, tmp_path, capsys):
        assert all(row.config(base[0].config) for row in ROWS.values())
        out = tmp_path / "new" / "rows.json"
        arguments = [*ARGUMENTS, "--text", str(folder), "--out", str(out), "--json"]
        assert real.main([*arguments, "--rows", "floor"]) == 0
        first = json.loads(capsys.readouterr().out)["rows"][0]
        assert first["kl_share_of_nf4"] is None
        assert real.main([*arguments, "--rows", "original,nf4,start"]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures == json.loads(out.read_text())
        rows = {row["name"]: row for row in figures["rows"]}
        assert (
            tuple(rows) == ("nf4", "floor", "start", "original")
            and rows["floor"]["ended"] == first["ended"]
        )
        for name, row in rows.items():
            assert math.isfinite(row["figures"]["kl"]) and row["figures"]["tokens"] > 200, name
            share = row["figures"]["kl"] / rows["nf4"]["figures"]["kl"]
            assert row["kl_share_of_nf4"] == pytest.approx(share)
            if name not in ("nf4", "floor"):
                assert row["parameters"] > 0 and row["minutes"] > 0 and row["forward_passes"] > 0
            assert ("start_passes" in row) == (ROWS[name].form.get("init") == "calibrated")
        assert rows["start"]["figures"]["kl"] < rows["floor"]["figures"]["kl"]

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--rows", "floor,fast"], "'fast'"),
            (["--rows", "16/0/4"], "'16/0/4'"),
            (["--model", "./nowhere"], "./nowhere"),
            (["--length", "-1"], "max_length is -1"),
        ],
    )
    def test_flags_that_cannot_work_are_one_line(self, flags, words, folder, tmp_path, capsys):
        out = tmp_path / "rows.json"
        assert real.main([*ARGUMENTS, "--text", str(folder), "--out", str(out), *flags]) == 2
        shown = capsys.readouterr()
        assert words in shown.err and shown.err.count("\n") == 1 and not out.exists()

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("[1]", "is not a file of real.py"),
            ('{"rows": [], "model": "other"}', "has rows of other settings"),
        ],
    )
    def test_another_file_is_not_written_over(self, content, words, folder, tmp_path, capsys):
        out = tmp_path / "rows.json"
        out.write_text(content)
        assert real.main([*ARGUMENTS, "--text", str(folder), "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
        assert out.read_text() == content

    def test_without_a_model_the_remedy_is_named(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("NPT_CACHE", str(tmp_path))
        monkeypatch.delenv("REAL_MODEL", raising=False)
        assert real.main([]) == 2
        assert "python benchmarks/fetch_model.py" in capsys.readouterr().err
