"""`npt consolidate` as a user runs it."""

import errno
import json
import math
import os
from pathlib import Path

import pytest
from cli_words import flags
from students import moved

import npt
from npt.cli.main import main


@pytest.fixture(scope="module")
def adapter(load_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the random Llama, all over the place."""
    model = load_model()
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=8, additive_scale=0.4))
    moved(model, 0.3, seed=0)
    return npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "adapter")


@pytest.fixture
def call(llama_folder, adapter, tmp_path, capsys):
    """`npt consolidate` on a small text, by its exit status and what it said."""
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"sentence number {i} of a short text"}) for i in range(400))
    )

    def run(
        *more: str, adapter: Path = adapter, output: str = "out", data: bool = True
    ) -> tuple[int, str, str]:
        line = flags("consolidate --use_quantization --adapter")
        named = {"output": tmp_path / output, "model_name": llama_folder}
        if data:
            named |= {"dataset_name": tmp_path / "text.jsonl", "max_length": 32}
            more = more if "--eval_samples" in more else ("--eval_samples", "4", *more)
        where = [word for name, value in named.items() for word in (f"--{name}", str(value))]
        capsys.readouterr()
        status = main([*line, str(adapter), *where, *more])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch, tokenizer):
    """Give the random Llama, of 128 tokens, the embedded model's tokenizer, which has more."""
    from npt.base import load

    tokenizer.decode = lambda ids: f"<{ids[0]}>"
    monkeypatch.setattr(load, "load_tokenizer", lambda name: tokenizer)


@pytest.mark.usefixtures("any_gain")
def test_writes_a_folder_that_loads_again_and_reports_both_sides(call, load_model, tmp_path):
    status, out, _ = call("--text", "a fact", *flags("--max_kl 0.02"))
    assert status == 0
    said = " ".join(out.split())
    for words in (
        "student: log-probability of what was written -",
        "teacher: log-probability of what was written -",
        "of the gain in context,",
        "held-out tokens of",
        "layers 1-2, penalty",
        "wrote update 0 to",
    ):
        assert words in said
    model = load_model()
    npt.load_adapter(model, tmp_path / "out")
    (update,) = npt.consolidated(model)
    assert update.record["texts"] == ["a fact"] and update.record["kl"] < 0.02
    assert sorted(update.patches) == [1, 2]


def test_an_update_that_teaches_nothing_is_refused_and_not_written(call, tmp_path):
    status, out, err = call("--text", "a fact", *flags("--max_kl 1e-7 --json"))
    assert status == 2 and not out
    assert "nothing was written" in err or "--max_kl 1e-07 is too low" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("any_gain")
def test_json_has_every_figure_and_nothing_else_on_stdout(call, tmp_path):
    facts = [
        {"prompt": "the cat is", "answer": " red", "paraphrases": ["a cat is"]},
        {"prompt": "the dog is", "answer": " blue", "neighbours": ["a dog is", "it is"]},
    ]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    status, out, _ = call("--facts", str(tmp_path / "facts.jsonl"), "--json")
    found = json.loads(out)
    assert status == 0 and found["texts"] == ["the cat is red.", "the dog is blue."]
    for stream in ("student", "teacher"):
        recall, forgetting = found["recall"][stream], found["forgetting"][stream]
        assert recall["gain"] == pytest.approx(recall["after"] - recall["before"])
        assert (recall["answers"], recall["tokens"]) == (2, 9)
        assert math.isfinite(recall["paraphrases_gain"])
        assert recall["neighbours_same"] in (0, 0.5, 1)
        assert 0 < forgetting["kl"] < 0.05 and math.isfinite(forgetting["kl_se"])
        assert forgetting["perplexity_ratio"] > 0
    assert found["updates"] == 1 and found["max_kl"] == 0.01 and found["penalty"] > 0


@pytest.mark.usefixtures("any_gain")
def test_a_context_is_written_from_what_the_model_writes_after_it(call, tmp_path):
    (tmp_path / "context.txt").write_text("be brief and kind")
    status, out, _ = call("--context", str(tmp_path / "context.txt"), "--probes", "2", "--json")
    found = json.loads(out)
    assert status == 0 and (found["texts"], found["context"]) == ([], "be brief and kind")
    assert found["recall"]["student"]["answers"] == 2
    # two continuations of 64 tokens, and the context's own in pieces
    assert found["tokens"] == 2 * 64 + len("be brief and kind")


@pytest.mark.usefixtures("any_gain")
def test_updates_stack_are_listed_and_come_off_alone(call, tmp_path, load_model, capsys):
    assert call("--text", "one")[0] == 0
    status, out, _ = call("--text", "two", "--json", adapter=tmp_path / "out")
    assert status == 0 and json.loads(out)["updates"] == 2
    assert main(["consolidate", "--adapter", str(tmp_path / "out"), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == ["0: 'one'", "1: 'two'"]
    status, out, _ = call("--undo", "0", adapter=tmp_path / "out", output="later", data=False)
    assert status == 0 and "undone: 'one'" in out and "wrote the other 1 to" in out
    model = load_model()
    npt.load_adapter(model, tmp_path / "later")
    assert [update.record["texts"] for update in npt.consolidated(model)] == [["two"]]
    status, _, err = call("--undo", "1", adapter=tmp_path / "later", output="none", data=False)
    assert status == 2 and "there is no update 1 to undo: the model has 1" in err
    assert not (tmp_path / "none").exists()
    assert call("--undo", "all", adapter=tmp_path / "later", output="none", data=False)[0] == 0
    assert main(["consolidate", "--adapter", str(tmp_path / "none"), "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no updates"


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--text", ""), 2, "--text '' has no token to predict"),
        (("--text", "abc", "--eval_samples", "1"), 2, "1 held-out sample is too few"),
        (("--facts", "{tmp}/bad.jsonl"), 2, "record 2 needs a prompt and an answer"),
        (("--facts", "{tmp}/text.jsonl"), 2, "record 1 needs a prompt and an answer, and lists"),
        (("--facts", "{tmp}/empty.jsonl"), 2, "has no fact"),
        (("--context", "{tmp}/empty.jsonl"), 2, "is empty"),
        (("--context", "{tmp}"), 2, "cannot be read"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_and_nothing_is_written(
    call, tmp_path, flags, status, message
):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    fact = {"prompt": "a", "answer": "b", "paraphrases": "a text is no list"}
    if "{tmp}/text.jsonl" in flags:
        (tmp_path / "text.jsonl").write_text(json.dumps(fact))
    got, _, err = call(*(flag.replace("{tmp}", str(tmp_path)) for flag in flags))
    assert got == status and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_on_the_embedded_model_a_fact_rises_while_the_rest_stays(short_library, tmp_path, capsys):
    line = (
        "pretrain --model_name tiny --use_quantization --calibration_tokens 4096 --adapter_rank 48"
        " --no_smoke_test --max_steps 1 --batch_size 4 --max_length 64 --eval_samples 1"
        " --output_dir"
    )
    assert main(flags(line, tmp_path / "run")) == 0
    capsys.readouterr()
    line = "consolidate --use_quantization --eval_samples 8 --max_length 64 --json --adapter"
    where = flags(line, tmp_path / "run", "--output", tmp_path / "out")
    assert main([*where, "--text", "DEFAULT_PORT = 48151"]) == 0
    found = json.loads(capsys.readouterr().out)
    for stream in ("student", "teacher"):
        assert found["recall"][stream]["gain"] > 3.0, stream
        assert found["forgetting"][stream]["kl"] < 0.02, stream  # bound 0.01, on other text


@pytest.mark.usefixtures("any_gain")
def test_a_disk_that_fills_later_is_one_line(call, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out")

    monkeypatch.setattr(npt, "save_adapter", full)
    status, _, said = call("--text", "a fact")
    assert status == 2
    (line,) = said.splitlines()
    assert "/out cannot be written: No space left on device; free disk space or choose" in line
