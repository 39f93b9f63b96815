"""A chat template that writes today's date: the same tokens for a run's whole life, and the same
held-out documents on every day.
"""

import json
from datetime import datetime, timedelta
from typing import Any

import pytest

import npt
from npt.base.source import load_tokenizer
from npt.cli.main import main
from npt.data import chat
from npt.data.samples import Samples, cut
from npt.evaluation.generate import prompt_ids
from npt.tools.collect.collect import collect
from npt.tools.collect.prompts import written_prompts

TEMPLATE = (
    "{{ '<s>' }}Today is {{ strftime_now('%d %b %Y') }}.{% for m in messages %}[{{ m['role'] }}]"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONFIG = npt.DataConfig(max_length=96)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the day."""

    class Clock(datetime):
        day = 0

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 3, 1, 12) + timedelta(days=cls.day)

    monkeypatch.setattr(chat, "datetime", Clock)
    return Clock


def dated() -> Any:
    tokenizer = npt.load_base("tiny", quantization=None, device="cpu")[1]
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def talks(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": str(i),
            "messages": [
                {"role": "user", "content": f"what is {i}?"},
                {"role": "assistant", "content": f"it is {i}"},
            ],
        }
        for i in range(count)
    ]


def test_a_tokenizer_keeps_the_date_that_it_wrote_first(clock) -> None:
    tokenizer = dated()
    before = prompt_ids(tokenizer, "hello")
    assert "Today is 01 Mar 2026." in tokenizer.decode(before)
    clock.day = 1
    assert prompt_ids(tokenizer, "hello") == before
    (sample,) = cut(talks(1), tokenizer, CONFIG)
    assert "01 Mar" in tokenizer.decode(list(sample.input_ids))
    assert "02 Mar" in tokenizer.decode(prompt_ids(dated(), "hello"))


@pytest.mark.parametrize(
    "template",
    [
        "\n {{ strftime_now('%d %b %Y') }} \n",
        '{% if strftime_now is defined %}{% set day = strftime_now("%A %x") %}{{ day }}{% endif %}',
        "{% macro at() %}{{ strftime_now('%Y-%m-%dT%H:%M') }}{% endmacro %} {{ at() }}",
        "{% for m in messages %}{{ m.content + strftime_now('%-d of %B, 100%') }}{% endfor %}",
    ],
)
def test_a_fixed_date_is_written_as_todays_would_be(template, clock, monkeypatch) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
    tokenizer, messages = dated(), talks(1)[0]["messages"]
    tokenizer.chat_template = template
    today = tokenizer.apply_chat_template(messages, tokenize=False)
    assert chat.render(tokenizer, messages, to_answer=False) == today
    clock.day = 1
    assert chat.render(tokenizer, messages, to_answer=False) == today
    assert tokenizer.apply_chat_template(messages, tokenize=False) != today


def test_the_same_documents_are_held_out_on_the_next_day(clock) -> None:
    data = talks(200)

    def names() -> tuple[set[str], set[str]]:
        held_out = {s.id.partition("@")[0] for s in cut(data, dated(), CONFIG) if s.heldout}
        trained = Samples(data, dated(), CONFIG, seed=0).epoch(0)
        return held_out, {s.id.partition("@")[0] for s in trained}

    held_out, trained = names()
    clock.day = 1
    assert names() == (held_out, trained)
    assert 4 < len(held_out) < 20 and not held_out & trained


def test_a_resumed_run_writes_the_date_of_its_start(clock, tmp_path) -> None:
    def run(tokenizer: Any, **settings: Any) -> npt.Trainer:
        model, _ = npt.load_base("tiny", device="cpu")
        npt.attach(model, npt.NPTConfig(rank=2, layers="3"))
        config = npt.TrainConfig(
            output_dir=str(tmp_path), smoke_test=False, batch_size=1, eval_samples=2, **settings
        )
        trainer = npt.Trainer(
            model, tokenizer, talks(40), config, data_config=CONFIG, console=None, report=False
        )
        trainer.train()
        return trainer

    run(dated(), max_steps=2, save_steps=2)
    clock.day = 1
    resumed = run(later := dated(), max_steps=4, resume="auto")
    written = json.loads((tmp_path / "run.json").read_text())["date"]
    assert chat.date_of(later) == "2026-03-01T12:00:00" == written
    assert "Today is 01 Mar 2026." in later.decode(list(resumed.data.eval_samples[0].input_ids))


def test_an_evaluation_writes_the_date_of_the_run(clock, tmp_path, monkeypatch, capsys) -> None:
    model, tokenizer = npt.load_base("tiny", device="cpu")
    tokenizer.chat_template = TEMPLATE
    npt.attach(model, npt.NPTConfig(rank=2, layers="3"))
    config = npt.TrainConfig(
        output_dir=str(tmp_path / "run"), smoke_test=False, max_steps=1, eval_samples=2
    )
    given = {"data_config": CONFIG, "console": None, "report": False}
    npt.Trainer(model, tokenizer, talks(40), config, **given).train()
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps(talk) + "\n" for talk in talks(40)), encoding="utf-8")

    def loaded(name: str) -> Any:
        fresh = load_tokenizer(name)
        fresh.chat_template = TEMPLATE
        return fresh

    monkeypatch.setattr("npt.base.load.load_tokenizer", loaded)
    asked = ["--dataset_name", str(data), "--max_length", "96", "--eval_samples", "2", "--json"]
    found = []
    capsys.readouterr()
    for day in (0, 400):
        clock.day = day
        assert main(["evaluate", "--adapter", str(tmp_path / "run"), *asked]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_a_collection_goes_on_with_the_date_of_its_start(clock, tmp_path) -> None:
    given = {"max_new_tokens": 2, "num_prompts": 4, "batch_size": 2, "data_config": CONFIG}

    def gather(**more: Any) -> Any:
        return collect(model, dated(), talks(6), tmp_path / "found.jsonl", **given, **more)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    model, _ = npt.load_base("tiny", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=2, layers="3"))
    with pytest.raises(KeyboardInterrupt):
        gather(report=stop)
    clock.day = 1
    assert gather().resumed == 2


def test_a_prompt_of_the_command_line_is_a_users_message() -> None:
    (record,) = written_prompts(["what?"], dated())
    assert record["prompt"] == [{"role": "user", "content": "what?"}]
