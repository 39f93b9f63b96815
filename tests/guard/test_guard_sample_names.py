"""A refusal under a Trainer names the rows of the dataset."""

from typing import Any

import pytest
from guarded_loops import assert_equal
from guarded_trainers import small_llama, state_of, trainer_of
from several import several, values
from torch.utils.data import IterableDataset
from transformers import Trainer

from faults.row_faults import plant, row
from npt.guard import Guard, protect

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
    step = Guard.micro_batch
    monkeypatch.setattr(
        Guard, "micro_batch", lambda *a, ids, **k: named.append(ids) or step(*a, ids=ids, **k)
    )
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


@pytest.mark.parametrize("data", [Stream(), None], ids=["stream", "out of order"])
def test_rows_whose_order_is_not_known_have_no_names(data, tmp_path, monkeypatch) -> None:
    names = refused_in(monkeypatch)
    order = {} if data else {"dataloader_in_order": False, "dataloader_num_workers": 1}
    trainer = protect(shuffled(tmp_path, max_steps=3, **order))
    trainer.train_dataset = data or trainer.train_dataset
    trainer.train()
    assert names == [()]


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
