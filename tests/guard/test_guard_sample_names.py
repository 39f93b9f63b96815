"""A refusal under a Trainer names the rows of the data set."""

from __future__ import annotations

from typing import Any

import pytest
from accelerate.data_loader import prepare_data_loader
from guarded_loops import assert_equal
from guarded_trainers import small_llama, state_of, trainer_of
from several import several, values
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from faults.row_faults import plant, row
from npt.guard import Guard, protect
from npt.guard.order import Order, note_order

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


def test_a_finding_names_the_sample_of_its_row(tmp_path) -> None:
    trainer = protect(shuffled(tmp_path, max_steps=6), trace=1)
    trainer.train()
    (finding,) = trainer.guard.findings
    verdict = finding.verdict
    assert verdict.sample == finding.refusal.sample_ids[verdict.row]
    assert f"of sample {verdict.sample}" in str(finding)


def test_two_processes_name_the_same_rows(tmp_path) -> None:
    ended = values(several(2, named_rows, tmp_path))
    assert ended[0] == ended[1]
    assert len(ended[0]) == 2 and all(str(BAD) in ids for _, ids in ended[0])


def named_rows(_processes: Any, folder: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        refusals: list[Any] = []
        step = Guard.step

        def noting(self: Guard) -> Any:
            outcome = step(self)
            refusals.extend((r.process, r.sample_ids) for r in outcome.refused)
            return outcome

        patch.setattr(Guard, "step", noting)
        trainer = protect(shuffled(folder, max_steps=4))
        trainer.train()
        assert trainer.args.world_size == 2
        return refusals
