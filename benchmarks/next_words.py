"""Make multiple-choice items of a text, on which teacher and student can be scored offline.

    python benchmarks/next_words.py --text FILE --out FOLDER [--items 500]

Each item is 48 words of a document and four words: the one that follows, and three others of the
same document. The folder holds the items and the task `next_word` for lm-evaluation-harness,
which scores views of a model (docs/guides/using-a-student.md). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npt.config import DataConfig
from npt.errors import DataError, NPTError
from npt.files import write_text
from real_text import Document, in_turn, read_documents, shuffled, unique

CONTEXT = 48
"""Words before the one that is asked for."""
CHOICES = 4
WORD = re.compile(r"[a-z]{4,}")
"""One that can be asked for: no name, no number, and few of those that any text is full of."""
TASK = """task: next_word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
  cache_dir: {cache}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def items_of(document: Document, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the items of a document, whose contexts do not overlap."""
    words = document.text.split()
    askable = sorted({word for word in words if WORD.fullmatch(word)})
    chance = random.Random(f"{seed}/{document.text}")
    place = CONTEXT
    while place < len(words) and len(askable) >= CHOICES:
        right = words[place]
        if not WORD.fullmatch(right):
            place += 1
            continue
        wrong = [word for word in chance.sample(askable, CHOICES) if word != right]
        choices = [right, *wrong[: CHOICES - 1]]
        chance.shuffle(choices)
        yield {
            "context": " ".join(words[place - CONTEXT : place]),
            "choices": choices,
            "answer": choices.index(right),
        }
        place += CONTEXT


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--text", required=True, help="as of real.py")
    parser.add_argument("--out", type=Path, required=True, help="folder, which is made")
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        documents = read_documents(DataConfig(dataset_name=args.text))
        in_order = shuffled(unique(documents, set()), args.seed)
        made = in_turn(items_of(document, args.seed) for document in in_order)
        items = list(itertools.islice(made, args.items))
        if len(items) < args.items:
            raise DataError(
                f"--text {args.text} gives {len(items)} items, and --items is {args.items}; give it"
                " more text, or ask for fewer"
            )
        args.out.mkdir(parents=True, exist_ok=True)
        folder = args.out.resolve()
        data = folder / "items.jsonl"
        write_text(data, "".join(json.dumps(item) + "\n" for item in items))
        task = TASK.format(items=json.dumps(str(data)), cache=json.dumps(str(folder / "cache")))
        write_text(folder / "next_word.yaml", task)
    except (NPTError, OSError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_status", 2)
    print(f"{len(items)} items of {len(documents)} documents: {data}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
