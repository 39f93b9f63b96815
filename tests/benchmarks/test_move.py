"""The benchmark of moved tasks, on a random model and tasks of its own."""

import json
import random
from pathlib import Path

import pytest
import torch

import move
import npt
from move import Batch, MoveTask, Question, head_effects, largest, last_token, means_in_context
from npt.adapters.converted import decoder_layers
from npt.errors import DataError
from npt.tools.editing.context_code import ContextCode

QUESTIONS = [Question([9, 33, 17], 70), Question([5, 60, 17, 44, 90], 12), Question([8, 3], 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A task: a name and the same in capitals."""
    folder = tmp_path_factory.mktemp("tasks")
    draws, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    names = {"".join(draws.choices(letters, k=4)) for _ in range(60)}
    rows = [{"input": name, "output": name.upper()} for name in sorted(names)]
    (folder / "upper.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture
def base(load_model):
    return load_model()


def logits_of(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


def test_padding_on_the_left_changes_no_answer(base):
    batch = Batch(QUESTIONS, "cpu")
    with torch.no_grad():
        together = base(**batch.inputs, logits_to_keep=1).logits[:, -1]
    for row, question in zip(together, QUESTIONS, strict=True):
        # logits of order 5 from rows of other lengths, in fp32
        torch.testing.assert_close(row, logits_of(base, question.ids), rtol=1e-4, atol=1e-4)
    right = [Question(q.ids, int(logits_of(base, q.ids).argmax())) for q in QUESTIONS]
    assert Batch(right, "cpu").accuracy(base) == 1
    assert Batch([right[0], Question([8, 3], 0)], "cpu").accuracy(base) in (0.5, 1.0)


def test_a_state_moved_onto_its_own_token_changes_nothing(base):
    question = QUESTIONS[1]
    states, heads = means_in_context(base, Batch([question], "cpu"))
    wanted = logits_of(base, question.ids)
    assert len(states) == len(heads) == len(decoder_layers(base))
    for layer, state in zip(decoder_layers(base), states, strict=True):
        with last_token(layer, lambda now, state=state: state.expand_as(now)):
            torch.testing.assert_close(logits_of(base, question.ids), wanted)
    with last_token(decoder_layers(base)[0], lambda now: now + 1):
        assert not torch.equal(logits_of(base, question.ids), wanted)


def test_the_effect_of_a_head_is_that_of_its_output_alone(base, monkeypatch):
    """Against one pass for each head; a head given what it had changes nothing."""
    monkeypatch.setattr(move, "LAYERS_AT_ONCE", 3)
    _, heads = means_in_context(base, Batch(QUESTIONS[:1], "cpu"))
    assert head_effects(base, QUESTIONS[:1], heads).abs().max() < 1e-6
    found = head_effects(base, QUESTIONS[1:2], heads)
    question, count = QUESTIONS[1], base.config.num_attention_heads
    plain = logits_of(base, question.ids).softmax(-1)[question.answer]
    for index, layer in enumerate(decoder_layers(base)):
        for head in range(count):
            size = len(heads[index]) // count

            def replace(_, inputs, index=index, part=slice(head * size, (head + 1) * size)):
                mixed = inputs[0].clone()
                mixed[:, -1, part] = heads[index][part]
                return (mixed,)

            handle = layer.self_attn.o_proj.register_forward_pre_hook(replace)
            alone = logits_of(base, question.ids).softmax(-1)[question.answer]
            handle.remove()
            assert float(found[index, head]) == pytest.approx(float(alone - plain), abs=1e-6)


def test_the_largest_numbers_are_those_of_all_layers():
    code = ContextCode({1: torch.tensor([3.0, -1.0, 0.5]), 2: torch.tensor([0.0, -4.0, 2.0])})
    kept = largest(code, 3)
    assert kept.codes[1].tolist() == [3, 0, 0] and kept.codes[2].tolist() == [0, -4, 2]


def test_no_query_is_an_example(folder):
    _, tokenizer = npt.load_base("tiny", device="cpu")
    task = MoveTask("upper", move.read_task(folder, "upper"), tokenizer, 6, 0)
    assert not {*task.measured} & {*task.choosing} and not {*task.measured} & {*task.moved_from}
    for pair in (*task.measured, *task.moved_from):
        text, alone = (
            tokenizer.decode(each.ids) for each in (task.in_context(pair), task.alone(pair))
        )
        assert text.endswith(f"Q: {pair[0]}\nA:") and text.count("Q:") == 6
        assert alone.count("Q:") == 1 and text.count(pair[1]) == 0
        assert not any(f"Q: {other}\n" in text for other, _ in {*task.measured} - {pair})
        mixed = tokenizer.decode(task.in_context(pair, shuffled=True).ids)
        assert sorted(mixed) == sorted(text) and mixed != text
    with pytest.raises(DataError, match="task upper has 60 pairs, 85 are needed: lower --queries"):
        MoveTask("upper", move.read_task(folder, "upper"), tokenizer, 30, 0)


def test_rows_are_written_and_kept(folder, tmp_path, capsys):
    out = tmp_path / "move.json"
    line = f"--data {folder} --model tiny --tasks upper --queries 3 --tokens 256 --text builtin"
    common = [*line.split(), "--out", str(out)]
    assert move.main([*common, "--students", "base", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    moved = {"hidden_state", "function_vector"}
    assert set(row["layers"]) == moved
    assert set(row["figures"]) == {"none", "examples", "written"} | moved
    assert move.main([*common, "--students", "16/16/16"]) == 0
    assert "| upper | 12 of 12 |" in capsys.readouterr().out
    _, student = json.loads(out.read_text())["rows"]
    assert set(student["figures"]) == {"none", "examples", "added", "replaced", "written"}
    numbers = [each["numbers"] for each in student["kept"]]
    assert numbers == sorted(numbers) and student["fewest"] in student["kept"]
    assert move.main([*common, "--students", "base", "--seed", "1"]) == 2
    assert "has rows of other settings" in capsys.readouterr().err
    assert move.main([*common[:2], "--tasks", "none", "--out", str(out)]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
