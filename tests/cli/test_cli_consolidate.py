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

    def run(*more: str, adapter: Path = adapter, output: str = "out") -> tuple[int, str, str]:
        line = flags("consolidate --use_quantization --eval_samples 4 --max_length 32 --adapter")
        named = {"output": tmp_path / output, "model_name": llama_folder}
        named["dataset_name"] = tmp_path / "text.jsonl"
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
    status, out, _ = call("--text", "a fact", *flags("--alpha 0.5 --max_kl 0.02"))
    assert status == 0
    for words in (
        "student: log-probability of the fact -",
        "held-out tokens of",
        "(lowered from 0.5 by",
    ):
        assert words in " ".join(out.split())
    model = load_model()
    npt.load_adapter(model, tmp_path / "out")
    (update,) = npt.consolidated(model)
    record = update.record
    assert (
        record["text"] == "a fact" and record["targets"] == ["down"] and 0 < record["alpha"] < 0.5
    )


def test_an_update_that_teaches_nothing_is_refused_and_not_written(call, tmp_path):
    status, out, err = call("--text", "a fact", *flags("--alpha 0.001 --json"))
    assert status == 2 and not out
    assert "the fact by only" in err and "nothing was written" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("any_gain")
def test_json_has_every_figure_and_nothing_else_on_stdout(call):
    fact = ["--text", "a fact", "--context", "it is told that "]
    status, out, _ = call(*fact, "--json")
    found = json.loads(out)
    assert status == 0 and found["layers"] == "1-2"
    assert (found["targets"], found["token"]) == (["down"], 22)
    for stream in ("student", "teacher"):
        recall, forgetting = found["recall"][stream], found["forgetting"][stream]
        assert recall["gain"] == pytest.approx(recall["after"] - recall["before"])
        assert recall["tokens"] == 6
        assert 0 < forgetting["kl"] < 0.05 and math.isfinite(forgetting["kl_se"])
        assert forgetting["perplexity_ratio"] > 0
    assert found["updates"] == 1 and found["asked_alpha"] == 0.5 and found["max_kl"] == 0.01


@pytest.mark.usefixtures("any_gain")
def test_updates_stack_from_folder_to_folder(call, tmp_path, load_model):
    assert call("--text", "one")[0] == 0
    status, out, _ = call("--text", "two", "--json", adapter=tmp_path / "out")
    assert status == 0 and json.loads(out)["updates"] == 2
    model = load_model()
    npt.load_adapter(model, tmp_path / "out")
    assert [update.record["text"] for update in npt.consolidated(model)] == ["one", "two"]


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (("--text", ""), 2, "--text '' has no token to predict"),
        (("--text", "abc", "--token", "4"), 2, "there is no token 4: the text has tokens -4 to 3"),
        (("--text", "abc", "--alpha", "0"), 2, "--alpha is 0.0; it must be above 0"),
        (("--text", "abc", "--eval_samples", "1"), 2, "1 held-out sample is too few"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_and_nothing_is_written(
    call, tmp_path, flags, status, message
):
    got, _, err = call(*flags)
    assert got == status and message in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_on_the_embedded_model_a_fact_rises_while_the_rest_stays(short_library, tmp_path, capsys):
    """Both streams of a briefly trained student: log-probability up for a statement, held-out KL
    under 0.01.
    """
    line = (
        "pretrain --model_name tiny --use_quantization --init random --adapter_rank 32"
        " --additive_scale 1.0 --no_smoke_test --learning_rate 0.01 --max_steps 10 --warmup_steps 2"
        " --batch_size 4 --max_length 32 --eval_samples 1 --output_dir"
    )
    assert main(flags(line, tmp_path / "run")) == 0
    capsys.readouterr()
    line = "consolidate --use_quantization --eval_samples 4 --max_length 64 --json --adapter"
    where = flags(line, tmp_path / "run", "--output", tmp_path / "out")
    assert main([*where, "--text", "The capital of Zubrowka is Lutz."]) == 0
    found = json.loads(capsys.readouterr().out)
    for stream in ("student", "teacher"):
        assert found["recall"][stream]["gain"] > 0, stream
        # 0.0103 measured with the text of Python 3.11.2
        assert found["forgetting"][stream]["kl"] < 0.02, stream


@pytest.mark.usefixtures("any_gain")
def test_a_disk_that_fills_later_is_one_line_after_the_figures(call, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out")

    monkeypatch.setattr(npt, "save_adapter", full)
    status, out, said = call("--text", "a fact")
    assert status == 2 and "held-out tokens of" in " ".join(out.split())
    (line,) = said.splitlines()
    assert "/out cannot be written: No space left on device; free disk space or choose" in line
    assert "and add --alpha 0.1" in line and line.endswith(" --max_kl inf to skip the search")
