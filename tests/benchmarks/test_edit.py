"""The benchmark of edits, on the embedded model and a few facts."""

import json

import pytest

import edit


def test_the_repository_has_a_dozen_facts_of_its_own():
    facts = list(edit.read_facts(str(edit.OWN)))
    assert len(facts) == 12 and all(f.paraphrases and f.neighbours for f in facts)


@pytest.mark.slow
def test_every_row_is_measured_and_written(tmp_path, monkeypatch):
    text = "\n".join(f"A line of general text about the number {n}. " * 12 for n in range(80))
    (tmp_path / "text.txt").write_text(text)
    facts = edit.OWN.read_text(encoding="utf-8").splitlines()[:2]
    (tmp_path / "facts.jsonl").write_text("\n".join(facts))
    monkeypatch.setattr(edit, "REPORT_SAMPLES", 4)
    monkeypatch.setattr(edit, "MEMIT_STEPS", 3)
    out = tmp_path / "edit.json"
    where = ["--text", str(tmp_path / "text.txt"), "--facts", str(tmp_path / "facts.jsonl")]
    given = ["--model", "tiny", "--max_kl", "0.5", "--out", str(out)]
    assert edit.main([*where, *given]) == 0
    found = json.loads(out.read_text())
    assert list(found["rows"]) == list(edit.ROWS)
    assert found["rows"]["all"]["answer_share"] > 0
    for name in ("one", "six", "all", "in turn", "memit", "lora", "fine-tuning"):
        row = found["rows"][name]
        assert row["kl"] < 1.0 and row["seconds"] > 0, name
        assert 0 <= row["neighbours"] <= 1
    assert found["rows"]["before"]["kl"] == 0
