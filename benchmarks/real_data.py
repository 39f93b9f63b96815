"""Write the text of `make real`: English prose, and as much of chats that the model writes itself.

    python benchmarks/real_data.py [--model FOLDER_OR_FILE.gguf] [--chats 256] [--out FOLDER]

It prints the path of `train.jsonl`, which it writes once. For a chat, the model continues its
template's opening of a user's message, and then answers it; both are sampled (Xu et al., Magpie,
2024). `questions.jsonl` beside it has the model's most likely answers to the questions below, which
no training reads. A model without a chat template gets prose alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import npt
from fetch_model import downloads, fetched
from npt.console import complain, put
from npt.data.chat import has_template, render
from npt.data.continuation import bare_tokens
from npt.data.prose import prose
from npt.errors import ModelError, NPTError
from npt.files import write_text

QUESTIONS = (
    "What is the difference between weather and climate?",
    "Write a short poem about a lighthouse in winter.",
    "How do I boil an egg so that the yolk stays soft?",
    "Explain recursion to a ten-year-old.",
    "Give me three reasons to learn a second language.",
    "What causes the tides?",
    "Write a polite email that asks for a deadline to be moved by a week.",
    "Which planets can be seen without a telescope?",
    "How does a bicycle stay upright?",
    "Suggest a name for a bakery that sells only rye bread, and say why.",
    "What should I check before I buy a used car?",
    "Summarise the story of Robinson Crusoe in four sentences.",
    "What is a prime number? Name the first ten.",
    "Why is the sky blue and the sunset red?",
    "Write a Python function that reverses the words of a sentence.",
    "My tomato plants have yellow leaves. What can be wrong?",
)
MESSAGE_TOKENS, ANSWER_TOKENS = 64, 192
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9}
BATCH = 64
"""Chats written at a time."""
FEWEST = 8
"""The same for the last ones; of so many messages one is new."""
SHORTEST = 12
"""Characters of the shortest message that is kept."""
MARK = "\x00"


def answers(model: Any, tokenizer: Any, texts: Sequence[str], tokens: int, **how: Any) -> list[str]:
    """Return the model's continuation of each text, without special tokens. A continuation that
    does not end within `tokens` is cut there.
    """
    rows = [bare_tokens(tokenizer, text) for text in texts]
    width = max(map(len, rows))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    written = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
        **how,
    )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in written[:, width:]]


def write_chats(model: Any, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Return chats of one question, by the model, and its answer."""
    asked = [{"role": "user", "content": MARK}]
    opening = render(tokenizer, asked, to_answer=False).partition(MARK)[0]
    chats: dict[str, dict[str, Any]] = {}
    while len(chats) < count:
        openings = [opening] * max(FEWEST, min(BATCH, count - len(chats)))
        messages = answers(model, tokenizer, openings, MESSAGE_TOKENS, **SAMPLED)
        new = [m for m in map(str.strip, messages) if len(m) >= SHORTEST and m not in chats]
        if not new:
            raise ModelError("the model writes no messages of a user: pass a chat model")
        written = answers(model, tokenizer, opened(tokenizer, new), ANSWER_TOKENS, **SAMPLED)
        for message, answer in zip(new, written, strict=True):
            if answer.strip():
                chats[message] = record(tokenizer, message, answer)
        complain(f"{min(len(chats), count)} of {count} chats")
    return list(chats.values())[:count]


def opened(tokenizer: Any, messages: Sequence[str]) -> list[str]:
    """Return the text before the answer to each message."""
    if not has_template(tokenizer):
        return list(messages)
    return [
        render(tokenizer, [{"role": "user", "content": message}], to_answer=True)
        for message in messages
    ]


def record(tokenizer: Any, message: str, answer: str) -> dict[str, Any]:
    """Return a training record of a message and its answer."""
    if not has_template(tokenizer):
        return {"prompt": message, "completion": answer}
    user = {"role": "user", "content": message}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def documents(size: int) -> list[dict[str, Any]]:
    """Return documents of English prose, in a random order, until they have `size` characters."""
    chosen, left = [], size
    every = list(prose("train"))
    random.Random(0).shuffle(every)
    for name, text in every:
        if left <= 0:
            break
        chosen.append({"text": text, "id": name})
        left -= len(text)
    return chosen


def lines(records: Iterable[dict[str, Any]]) -> str:
    """Return records as JSON lines."""
    return "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="default: the model of fetch_model.py")
    parser.add_argument("--chats", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: in npt's cache")
    args = parser.parse_args(argv)
    try:
        path = Path(args.model) if args.model else fetched()
        folder = args.out or downloads() / f"text-{path.name}"
        train, questions = folder / "train.jsonl", folder / "questions.jsonl"
        if not train.exists():
            model, tokenizer = npt.load_base(str(path), quantization="nf4")
            torch.manual_seed(0)
            texts = opened(tokenizer, QUESTIONS)
            replies = answers(model, tokenizer, texts, ANSWER_TOKENS, do_sample=False)
            asked = [record(tokenizer, *pair) for pair in zip(QUESTIONS, replies, strict=True)]
            folder.mkdir(parents=True, exist_ok=True)
            write_text(questions, lines(asked))
            chats = write_chats(model, tokenizer, args.chats) if has_template(tokenizer) else []
            size = len(lines(chats)) if chats else sys.maxsize
            write_text(train, lines([*documents(size), *chats]))
    except (NPTError, OSError) as error:
        complain(f"real_data.py: {error}")
        return getattr(error, "exit_status", 2)
    put(str(train))
    return 0


if __name__ == "__main__":
    sys.exit(main())
