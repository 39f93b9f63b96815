"""The benchmark on a real language model, on the embedded one: its documents, its rows, its rivals,
and what a second start keeps.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import npt
import real
from npt.adapters.converted import adapter_mode, npt_layers
from npt.console import silent_console
from npt.data.batch import collate
from npt.data.readers import is_heldout
from npt.errors import DataError, TooLittleTextError
from npt.evaluation.metrics import COLUMNS, final_states
from real_rows import ROWS, Bench, by_document
from real_tables import markdown, with_shares
from real_text import Document, divided, read_text
from real_training import LoRA, Training, train
from results_file import check_place

WORDS = ("the", "token", "of", "a", "layer", "is", "fed", "into", "and", "state", "comes", "out")


def prose(number: int, words: int = 120) -> str:
    """Return a text like no other."""
    return " ".join(
        WORDS[(i * (number + 3) + i // 7) % len(WORDS)] + str(number) for i in range(words)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two dozen documents."""
    found = tmp_path_factory.mktemp("text")
    for number in range(24):
        (found / f"{number}.txt").write_text(prose(number), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def base():
    return npt.load_base("tiny", quantization="nf4", device="cpu")


@pytest.fixture(scope="module")
def base_hash(base):
    return npt.base_hash(base[0])


@pytest.fixture(scope="module")
def text(folder, base):
    sizes = {"length": 64, "heldout_tokens": 256, "choosing_tokens": 128}
    return read_text(str(folder), base[1], base[0].config.vocab_size, **sizes)


@pytest.fixture(scope="module")
def bench(base, text):
    return Bench("tiny", *base, text, minutes=0.01, console=silent_console())


ARGUMENTS = ["--model", "tiny", "--length", "64", "--heldout_tokens", "256"]
ARGUMENTS += ["--choosing_tokens", "128", "--tokens", "512", "--minutes", "0.005"]


class TestDocuments:
    def test_the_three_parts_share_no_document(self, text):
        parts = [{s.document for s in part} for part in (text.fitted, text.choosing, text.heldout)]
        assert all(len(part) >= 2 for part in parts)
        assert len(set.union(*parts)) == sum(map(len, parts)) == 24
        assert sum(len(s.input_ids) for s in text.heldout) == 256

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

    def test_every_document_comes_once_before_one_comes_twice(self, text):
        names = [sample.document for sample in text.fitted]
        count = len(set(names))
        assert len(set(names[:count])) == count < len(names)

    def test_held_out_documents_of_a_source_are_measured_on(self, base, short_library):
        found = read_text(
            "builtin", base[1], 2048, length=32, heldout_tokens=64, choosing_tokens=64
        )

        assert all(is_heldout(s.document) for s in found.heldout)
        assert not any(is_heldout(s.document) for s in (*found.fitted, *found.choosing))

    def test_too_little_text_is_one_line(self, base, tmp_path):
        (tmp_path / "a.txt").write_text(prose(0))
        with pytest.raises(TooLittleTextError, match=r"--text .* has 1 documents"):
            read_text(str(tmp_path / "a.txt"), base[1], 2048)
        (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
        with pytest.raises(DataError, match="record 0 has no 'text'"):
            read_text(str(tmp_path / "b.jsonl"), base[1], 2048)


class TestLoRA:
    @pytest.fixture
    def lora(self, bench):
        pytest.importorskip("peft")
        config = bench.config(ROWS["lora"])
        found = LoRA(bench.model, (4, 5, 6, 7), bench._parameters(config))
        yield found
        found.close()

    def test_it_has_as_many_parameters_as_npt(self, bench, lora):
        ours = bench._parameters(bench.config(replace(ROWS["start"], form={})))
        assert lora.learner.size == pytest.approx(ours, rel=0.02)  # a whole rank's rounding

    def test_it_starts_as_the_floor_exactly(self, bench, lora):
        batch = collate(bench.text.heldout[:2])
        with torch.no_grad():
            with lora.student():
                started = final_states(bench.model, batch)
            taught = final_states(bench.model, batch)
            lora.close()
            npt.attach(bench.model, npt.NPTConfig(layers="upper_half", rank=2))
            with adapter_mode(bench.model, "floor"):
                floor = final_states(bench.model, batch)
            npt.detach(bench.model)
            teacher = final_states(bench.model, batch)
        assert torch.equal(started, floor) and torch.equal(taught, teacher)
        assert not torch.equal(started, teacher)

    def test_it_sees_no_context_in_its_layers(self, bench, lora):
        layer, seen = bench.model.model.layers[5], []
        handle = layer.register_forward_hook(lambda _, given, out: seen.append((given, out)))
        with torch.no_grad(), lora.student():
            final_states(bench.model, collate(bench.text.heldout[:1]))
            handle.remove()
            hidden = seen[0][0][0]
            alone = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        assert torch.equal(seen[0][1], alone)

    def test_a_step_lowers_its_loss_and_leaves_the_base(self, base_hash, bench, lora):
        learner, batch = lora.learner, collate(bench.text.fitted[:4])
        first = learner.backward(batch)
        assert all(torch.isfinite(p.grad).all() for p in learner.parameters)
        with torch.no_grad():
            for p in learner.parameters:
                p -= 0.01 * p.grad
                p.grad = None
        assert learner.backward(batch) < first
        lora.close()
        assert npt.base_hash(bench.model) == base_hash
        assert not any("lora" in name for name, _ in bench.model.named_modules())


class TestTraining:
    class Slope:
        """A learner of one number, whose loss is it."""

        def __init__(self):
            self.parameters = [torch.nn.Parameter(torch.ones(1))]
            self.size = 1

        def backward(self, batch):
            (loss := self.parameters[0].sum()).backward()
            return loss.detach()

    def test_the_nearest_check_remains(self, bench):
        learner, given = self.Slope(), iter([3.0, 2.0, 1.0, 4.0, 5.0])
        values = []

        def kl():
            values.append(float(learner.parameters[0].detach()))
            return next(given)

        found = train(learner, Training((0.1,)), bench.text.fitted, kl, 0.1)
        assert found.kept == 2 and found.choosing_kl == [3.0, 2.0, 1.0, 4.0, 5.0]
        assert values[0] == 1.0 and values[4] < values[2] < 1.0
        assert float(learner.parameters[0].detach()) == values[2]

    def test_a_training_that_only_loses_is_undone(self, bench):
        learner, given = self.Slope(), iter(range(9))
        found = train(learner, Training((0.1,)), bench.text.fitted, lambda: next(given), 0.0)
        assert found.kept == 0 and found.steps == 1
        assert float(learner.parameters[0].detach()) == 1.0

    def test_of_several_rates_the_nearest_is_taken_from_the_start(self, bench):
        learner = self.Slope()

        def kl():  # least at 0.9: a step with 0.1 reaches it, with others it is missed
            return abs(float(learner.parameters[0].detach()) - 0.9)

        settings = Training((0.01, 0.1, 1.0), share=0.0)
        found = train(learner, settings, bench.text.fitted, kl, 0.0)
        assert found.rate == 0.1 and list(found.trials) == ["0.01", "0.1", "1"]
        assert found.trials["1"] > found.trials["0.01"] > found.trials["0.1"]
        # of the last run alone: a step from the start, whatever the trials did
        assert found.steps == 1 and found.choosing_kl[0] == pytest.approx(0.1)
        assert float(learner.parameters[0].detach()) == pytest.approx(0.9)

    def test_a_rate_whose_loss_is_not_finite_is_not_taken(self, bench):
        learner, losses = self.Slope(), iter([math.nan, 1.0, 1.0])
        learner.backward = lambda batch: torch.tensor(next(losses))
        found = train(learner, Training((0.1, 0.2)), bench.text.fitted, lambda: 1.0, 0.0)
        assert found.trials == {"0.1": math.inf, "0.2": 1.0} and found.rate == 0.2

    def test_a_loss_that_is_not_finite_ends_it(self, bench):
        learner = self.Slope()
        learner.parameters[0].data.fill_(math.nan)
        with pytest.raises(npt.NPTError, match="the loss is nan at step 1"):
            train(learner, Training((0.1,)), bench.text.fitted, lambda: 1.0, 1.0)


class TestRows:
    def test_figures_are_those_of_an_evaluation(self, bench):
        npt.attach(bench.model, npt.NPTConfig(rank=4, additive_scale=1.0))
        try:
            found = bench.measure()
            expected = npt.evaluate(bench.model, bench.tokenizer, bench.text.heldout).student
        finally:
            npt.detach(bench.model)
        documents = {s.document for s in bench.text.heldout}
        assert found["documents"].keys() == documents and len(documents) == len(bench.text.heldout)
        for name, value in expected.as_dict().items():
            # batches of another size are rounded otherwise
            assert found["figures"][name] == pytest.approx(value, rel=1e-4, abs=1e-7), name

    def test_errors_are_over_documents(self, bench):
        """Twice the samples of the same documents do not make an error smaller."""
        sums = torch.rand(len(bench.text.heldout), len(COLUMNS), dtype=torch.float64) + 1
        once = by_document(sums, bench.text.heldout)["figures"]
        twice = by_document(sums.repeat(2, 1), bench.text.heldout * 2)["figures"]
        assert once["kl_se"] == pytest.approx(twice["kl_se"])
        assert once["kl"] == pytest.approx(twice["kl"])

    def test_every_row_of_upper_layers_has_its_rank(self, bench):
        hidden = bench.model.config.hidden_size
        assert bench.config(ROWS["start"]).rank == hidden // 4
        assert bench.config(ROWS["best-small"]).rank == hidden // 16
        assert bench.config(ROWS["all-but-first"]).layers == "1-7"
        original = bench.config(ROWS["original"])
        assert original.targets == ("gate",) and original.mult_form == "half_sigmoid"
        ours = bench._parameters(bench.config(replace(ROWS["start"], form={})))
        assert bench._parameters(original) == pytest.approx(ours, rel=0.02)

    def test_the_original_is_trained_and_the_base_stays(self, base_hash, bench):
        found = bench.make(replace(ROWS["original"], tokens=256))
        assert found["trained"]["steps"] >= 1 and found["minutes"] > 0
        assert not npt_layers(bench.model) and npt.base_hash(bench.model) == base_hash

    def test_a_start_that_takes_all_the_minutes_is_not_trained(self, bench):
        row = replace(ROWS["best"], tokens=512, divisor=48)
        found = replace(bench, minutes=1e-6).make(row)
        assert found["trained"] is None and found["start_passes"] > 0
        assert found["forward_passes"] == pytest.approx(found["start_passes"])


class TestCommand:
    def test_every_row_is_made_and_kept(self, folder, tmp_path, capsys, monkeypatch):
        pytest.importorskip("peft")
        for name, row in ROWS.items():
            monkeypatch.setitem(ROWS, name, replace(row, divisor=4 * row.divisor))
        out = tmp_path / "new" / "rows.json"
        arguments = [*ARGUMENTS, "--text", str(folder), "--out", str(out), "--json"]
        assert real.main(arguments) == 0
        figures = json.loads(capsys.readouterr().out)
        assert figures == json.loads(out.read_text()) and not figures["failed"]
        rows = {row["name"]: row for row in figures["rows"]}
        assert tuple(rows) == tuple(ROWS)
        for name, row in rows.items():
            assert math.isfinite(row["figures"]["kl"]) and row["figures"]["tokens"] > 200, name
            share = row["figures"]["kl"] / rows["nf4"]["figures"]["kl"]
            assert row["kl_share_of_nf4"] == pytest.approx(share)
            if name not in ("nf4", "floor"):
                assert row["parameters"] > 0 and row["minutes"] > 0 and row["forward_passes"] > 0
            assert (row.get("start_passes") is not None) == (
                ROWS[name].start and ROWS[name].kind == "npt"
            )
        assert rows["start"]["figures"]["kl"] < rows["floor"]["figures"]["kl"]
        table = out.with_suffix(".md").read_text()
        assert all(f"| {name} |" in table for name in ROWS)

    def test_a_second_start_keeps_rows_of_the_same_settings(self, folder, tmp_path, capsys):
        out = tmp_path / "rows.json"
        given = [*ARGUMENTS, "--text", str(folder), "--out", str(out), "--rows", "floor"]
        assert real.main(given) == 0
        first = out.read_bytes()
        capsys.readouterr()
        assert real.main([*given[:-1], "floor,nf4"]) == 0
        assert "floor: kept" in capsys.readouterr().err
        (nf4, floor), (before,) = json.loads(out.read_text())["rows"], json.loads(first)["rows"]
        assert nf4["name"] == "nf4" and floor["ended"] == before["ended"]
        assert real.main([*given, "--tokens", "400"]) == 0
        assert "floor: kept" not in capsys.readouterr().err
        assert real.main([*given, "--length", "32"]) == 2
        assert "has rows of another model, text" in capsys.readouterr().err

    def test_a_row_that_is_refused_leaves_the_others(self, folder, tmp_path, capsys):
        out = tmp_path / "rows.json"
        given = [*ARGUMENTS, "--tokens", "32", "--text", str(folder), "--out", str(out), "--json"]
        assert real.main([*given, "--rows", "start,floor"]) == 2
        shown = capsys.readouterr()
        figures = json.loads(shown.out)
        assert [row["name"] for row in figures["rows"]] == ["floor"]
        assert list(figures["failed"]) == ["start"] and "start is left out: " in shown.err
        assert "Left out: `start`" in markdown(figures)

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            (["--rows", "floor,fast"], "'fast'"),
            (["--minutes", "0"], "--minutes is 0"),
            (["--tokens", "1"], "--tokens is 1"),
            (["--fill", "nowhere.md"], "--fill is nowhere.md"),
            (["--model", "./nowhere"], "./nowhere"),
        ],
    )
    def test_flags_that_cannot_work_are_one_line(self, flags, named, folder, tmp_path, capsys):
        out = tmp_path / "rows.json"
        given = [*ARGUMENTS, "--text", str(folder), "--out", str(out)]
        assert real.main([*given, *flags]) == 2
        shown = capsys.readouterr()
        assert named in shown.err and shown.err.count("\n") == 1 and not out.exists()

    def test_another_file_is_not_written_over(self, folder, tmp_path, capsys):
        out = tmp_path / "rows.json"
        out.write_text("[1]")
        assert real.main([*ARGUMENTS, "--text", str(folder), "--out", str(out)]) == 2
        assert "is not a file of this benchmark" in capsys.readouterr().err
        assert out.read_text() == "[1]"

    def test_without_a_model_the_remedy_is_named(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("NPT_CACHE", str(tmp_path))
        monkeypatch.delenv("REAL_MODEL", raising=False)
        assert real.main([]) == 2
        assert "python benchmarks/fetch_model.py" in capsys.readouterr().err

    def test_the_results_have_a_place_for_the_table(self):
        check_place(
            Path(real.__file__).parents[1] / "docs" / "results" / "real-model.md", real.PLACE
        )


def test_a_share_needs_the_row_of_quantisation():
    row = {"name": "floor", "figures": {"kl": 2.0}}
    assert with_shares([row])[0]["kl_share_of_nf4"] is None
    unit = {"name": "nf4", "figures": {"kl": 4.0}}
    assert with_shares([unit, row])[1]["kl_share_of_nf4"] == 0.5


def test_attention_cut_to_every_direction_is_the_base(bench) -> None:
    whole = bench.make(replace(ROWS["cut"], divisor=1, tokens=512))
    assert whole["rank"] == bench.model.config.hidden_size
    # rounding of fp32 products; a layer without attention costs 1 nat
    assert whole["figures"]["kl"] < 1e-7
    half = bench.make(replace(ROWS["cut"], divisor=2, tokens=512))
    assert 1e-6 < half["figures"]["kl"] < bench.make(ROWS["floor"])["figures"]["kl"] / 10
    assert half["parameters"] * 2 == whole["parameters"] == 4 * 2 * 192 * 192
