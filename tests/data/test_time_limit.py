"""A chat template that loops for ever ends in one line."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import npt
from npt.data import chat
from npt.data.samples import cut
from npt.data.time_limit import TimeLimitError, _deadlines, time_limit
from npt.errors import DataError
from npt.evaluation.generate import prompt_ids

RANGE = "{% for i in range(99999) %}"
ENDLESS = RANGE * 3 + "{% endfor %}" * 3
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def is_watched() -> bool:
    return bool(_deadlines)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    tokenizer = npt.load_base("tiny", device="cpu")[1]
    tokenizer.chat_template = ENDLESS
    return tokenizer


def test_a_record_ends_in_one_line(tokenizer) -> None:
    records = [{"id": "7", "messages": TALK}]
    with pytest.raises(DataError, match=r"record 7: .*it does not come to an end"):
        list(cut(records, tokenizer, npt.DataConfig(max_length=32)))
    assert not is_watched()


def test_a_prompt_ends_in_one_line(tokenizer) -> None:
    with pytest.raises(DataError, match=r"it does not come to an end; add --raw"):
        prompt_ids(tokenizer, "hello", chat=True)


def test_what_ends_in_time_is_left_alone() -> None:
    for _ in range(1000):
        with time_limit(60):
            pass
    with time_limit(60):
        time.sleep(0.5)


def test_each_thread_has_its_own_limit() -> None:
    met: list[str] = []

    def spin(seconds: float, limit: float) -> None:
        end = time.monotonic() + seconds
        try:
            with time_limit(limit):
                while time.monotonic() < end:
                    pass
            met.append("done")
        except TimeLimitError:
            met.append("ended")

    threads = [threading.Thread(target=spin, args=each) for each in ((60, 0.2), (1, 60))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == ["ended", "done"]
    assert not is_watched()
