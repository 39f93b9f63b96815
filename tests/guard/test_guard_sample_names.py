"""A refusal under a Trainer names the rows of the data set."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from guarded_loops import assert_equal
from guarded_trainers import small_llama, state_of, trainer_of
from several import several, values
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from faults.row_faults import LENGTH, plant, row
from npt.errors import TooManyRefusalsError
from npt.guard import Guard, Refusal, protect
from npt.guard.order import Order, note_order
from npt.guard.rows import describe_rows

ROWS = 12
BAD = 7


class Stream(IterableDataset):
    def __iter__(self):
        return iter([row(i, "loss-nan" if i == BAD else None) for i in range(ROWS)])


def refused_in(monkeypatch) -> list[tuple[str, ...]]:
    """Return a list that gets the names of each refusal."""
    names: list[tuple[str, ...]] = []
    step = Guard.step

    def noting(self):
        outcome = step(self)
        names.extend(refusal.sample_ids for refusal in outcome.refused)
        return outcome

    monkeypatch.setattr(Guard, "step", noting)
    return names


def shuffled(folder, fault="loss-nan", **arguments):
    data = [row(i, fault if i == BAD else None) for i in range(ROWS)]
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **arguments}
    return trainer_of(Trainer, data, folder, plant(small_llama(), fault), **given)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_refusal_names_the_rows_of_the_data_set(workers, tmp_path, monkeypatch) -> None:
    names = refused_in(monkeypatch)
    protect(shuffled(tmp_path, max_steps=6, dataloader_num_workers=workers)).train()
    assert [len(pair) for pair in names] == [2, 2]
    assert all(str(BAD) in pair for pair in names)
    assert names[0] != names[1]


def test_a_resumed_run_is_stock_and_names_the_same_rows(tmp_path, monkeypatch) -> None:
    named: list[Any] = []
    whole: list[Any] = []
    names = Order.names
    monkeypatch.setattr(Order, "names", lambda *given: named.extend(made := names(*given)) or made)
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    stock = shuffled(tmp_path, None, **saving)
    stock.train()
    for done in (0, 1, 4):
        named.clear()
        trainer = protect(shuffled(tmp_path, None, **saving))
        trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{done}" if done else None)
        whole = whole if done else list(named)
        assert named == whole[2 * done :]
        assert_equal(state_of(trainer), state_of(stock), "state")
    assert sorted(sum(whole[:6], ())) == list(range(ROWS))


def test_a_stream_gives_the_place_in_the_epoch(tmp_path, monkeypatch) -> None:
    names = refused_in(monkeypatch)
    trainer = protect(shuffled(tmp_path, max_steps=3))
    trainer.train_dataset = Stream()
    trainer.train()
    assert names == [(f"batch {BAD // 2} of the epoch",)]


def test_a_loader_out_of_order_gives_the_place() -> None:
    loader = DataLoader(range(6), batch_size=2, num_workers=0, in_order=False)
    note_order(loader)
    drawn = iter(loader)
    next(drawn)
    assert Order().names(drawn, 1, loader, 0) == [("batch 0 of the epoch",)]


def test_each_process_names_its_own_rows() -> None:
    loader = DataLoader(range(8), batch_size=2)
    loader = prepare_data_loader(loader, num_processes=2, process_index=1, put_on_device=False)
    note_order(loader)
    drawn, order = iter(loader), Order()
    for _ in range(2):
        rows = next(drawn).tolist()
        assert order.names(drawn, 1, loader, 0) == [tuple(rows)]
    assert rows == [6, 7]


def test_batches_drawn_outside_of_a_training_pass(tmp_path) -> None:
    trainer = protect(shuffled(tmp_path))
    drawn, _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 2, "cpu")
    assert len(drawn) == 2


class Tokenizer:
    """Decodes ids as words, and marks a bad row by an escape and a newline."""

    def decode(self, ids: list[int]) -> str:
        return "\x1b[31m" + "\n".join(f"w{i}" for i in ids)


def test_warnings_of_refusals_describe_their_rows(tmp_path, caplog) -> None:
    trainer = protect(shuffled(tmp_path, max_steps=6), trace=1)
    trainer.processing_class = Tokenizer()
    with caplog.at_level(logging.WARNING, "npt.guard"):
        trainer.train()
    words = "\\n".join(f"w{i}" for i in row(BAD, "loss-nan")["input_ids"].tolist())
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("refused in")]
    assert len(told) == 2
    for line in told:  # the later one too, which is not traced
        assert f'sample {BAD}: {LENGTH} tokens, "\\x1b[31m{words}"'[:99] in line
        assert "\n" not in line and "\x1b" not in line
    (finding,) = trainer.guard.findings
    verdict = finding.verdict
    assert verdict.sample == finding.refusal.sample_ids[verdict.row]
    assert f"of sample {verdict.sample}" in str(finding)


def test_a_collators_tokenizer_decodes_too(tmp_path) -> None:
    class Collator:
        tokenizer = Tokenizer()

        def __call__(self, rows: list[Any]) -> Any:
            return {name: torch.stack([each[name] for each in rows]) for name in rows[0]}

    trainer = protect(shuffled(tmp_path, max_steps=6), max_refused=1)
    trainer.data_collator = Collator()
    with pytest.raises(TooManyRefusalsError, match=f'sample {BAD}: {LENGTH} tokens, ".+"'):
        trainer.train()


def test_the_post_mortem_holds_the_rows_text(tmp_path) -> None:
    trainer = protect(shuffled(tmp_path, max_steps=6), max_refused=1)
    trainer.processing_class = Tokenizer()
    with pytest.raises(TooManyRefusalsError, match=f'sample {BAD}: {LENGTH} tokens, ".+"'):
        trainer.train()
    (path,) = Path(tmp_path).glob("postmortem/*/postmortem.json")
    said = json.loads(path.read_text(encoding="utf-8"))
    (refusal,) = trainer.guard.outcome.refused
    assert said["refusals"][0]["rows"] == list(refusal.rows)
    assert Refusal.from_dict(refusal.as_dict()).rows == refusal.rows
    assert len(refusal.rows) == len(refusal.sample_ids) == 2


def test_rows_are_described_by_what_is_odd() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    pixels = torch.zeros(2, 3, 2, 2)
    pixels[1, 0, 0, 0] = torch.nan
    labels = torch.tensor([[-100, -100, -100], [4, 5, -100]])
    inputs = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "labels": labels}
    assert describe_rows(inputs, None) == (
        "every label is -100, 3 tokens",
        "pixel_values is not finite, 2 tokens",
    )
    assert describe_rows({"pixel_values": pixels}, None) == ("", "pixel_values is not finite")
    chosen = {"chosen_input_ids": ids, "chosen_attention_mask": mask}
    assert describe_rows(chosen, Tokenizer())[1] == '2 tokens, "\\x1b[31mw4\\nw5"'
    assert describe_rows((ids, mask), Tokenizer()) == describe_rows({}, Tokenizer()) == ()


def test_only_the_first_rows_are_shown() -> None:
    rows = tuple(f"{i} tokens" for i in range(6))
    text = str(Refusal("loss", "loss is nan", 0, tuple("abcdef"), rows=rows))
    assert text.endswith("sample d: 3 tokens; 2 rows more") and "sample e" not in text


def test_two_processes_name_the_same_rows(tmp_path) -> None:
    ended = values(several(2, named_rows, tmp_path))
    assert ended[0] == ended[1]
    assert [(process, str(BAD) in ids) for process, ids, _ in ended[0]] == [
        (process, True) for process, _, _ in ended[0]
    ]
    assert len(ended[0]) == 2
    words = "\\n".join(f"w{i}" for i in row(BAD, "loss-nan")["input_ids"].tolist())
    for _, ids, rows in ended[0]:
        assert words[:60] in rows[ids.index(str(BAD))]


def named_rows(_processes: Any, folder: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        refusals: list[Any] = []
        step = Guard.step

        def noting(self: Guard) -> Any:
            outcome = step(self)
            refusals.extend((r.process, r.sample_ids, r.rows) for r in outcome.refused)
            return outcome

        patch.setattr(Guard, "step", noting)
        trainer = protect(shuffled(folder, max_steps=4))
        trainer.processing_class = Tokenizer()
        trainer.train()
        assert trainer.args.world_size == 2
        return refusals
