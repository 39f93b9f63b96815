"""The benchmark of edits, on the embedded model and a few facts."""

import json

import pytest

import edit
import edit_contexts


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
    rows = ["--rows", ",".join(edit.FACT_ROWS)]
    assert edit.main([*where, *rows, *given]) == 0
    found = json.loads(out.read_text())
    assert list(found["rows"]) == list(edit.FACT_ROWS)
    assert found["rows"]["all"]["answer_share"] > 0
    for name in ("one", "six", "all", "in turn", "memit", "lora", "fine-tuning"):
        row = found["rows"][name]
        assert row["kl"] < 1.0 and row["seconds"] > 0, name
        assert 0 <= row["neighbours"] <= 1
    assert found["rows"]["before"]["kl"] == 0


@pytest.mark.slow
def test_contexts_are_written_judged_and_taken_out_again(tmp_path, monkeypatch):
    words = ["port", "host", "name", "value", "list", "count", "file", "line", "text", "node"]
    lines = (" ".join(words[(n * k) % 10] for k in range(1, 120)) for n in range(80))
    (tmp_path / "text.txt").write_text("\n".join(lines))
    prompts = tmp_path / "prompts.jsonl"
    prompt = {"context": "DEFAULT_PORT = 48151\n" * 3, "turns": ["the port", "a name"]}
    prompts.write_text("\n".join(json.dumps(prompt) for _ in range(2)))
    monkeypatch.setattr(edit, "REPORT_SAMPLES", 4)
    monkeypatch.setattr(edit_contexts, "PROMPTS", prompts)
    monkeypatch.setattr(edit_contexts, "CONTEXTS", 2)
    monkeypatch.setattr(edit_contexts, "DOCUMENT_TOKENS", 48)
    monkeypatch.setattr(edit_contexts, "JUDGED_TOKENS", 16)
    out = tmp_path / "edit.json"
    rows = ["--rows", "document,system prompt", "--max_kl", "0.5", "--out", str(out)]
    assert edit.main(["--text", str(tmp_path / "text.txt"), "--model", "tiny", *rows]) == 0
    found = json.loads(out.read_text())["rows"]
    assert list(found) == ["document", "system prompt"]
    for name, row in found.items():
        assert row["contexts"] == 2 and row["before"] > 0, name
        assert row["closed"] <= 1 and row["kl"] < 1.0, name
        assert row["left"] == 0, name
    assert found["document"]["closed"] > max(0.1, found["document"]["bias_closed"])
