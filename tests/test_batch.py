from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.batch import Batch, Sample, batch_from_tensors, batches, collate, find_fault, target_index

ROWS = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple), min_size=1, max_size=4
)


def make(*rows: tuple[int, ...]) -> list[Sample]:
    return [Sample(f"s{number}@0", row) for number, row in enumerate(rows)]


class TestCollate:
    @settings(deadline=None, max_examples=80)
    @given(
        rows=ROWS,
        side=st.sampled_from(["left", "right"]),
        pad=st.integers(0, 9),
        extra=st.integers(0, 3),
    )
    def test_keeps_every_token_and_adds_nothing_valid(self, rows, side, pad, extra):
        """The padding id is among the tokens on purpose: what is real is told by position."""
        width = max(map(len, rows)) + extra
        batch = collate(make(*rows), pad, side=side, length=width)
        assert batch.input_ids.shape == (len(rows), width)
        tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
        assert len(tensors) == 4 and {tensor.dtype for tensor in tensors} == {torch.int64}
        flat = [token for row in rows for token in row]
        assert batch.tokens == len(flat)
        assert batch.padded == (len(flat) < len(rows) * width)
        assert batch.input_ids.flatten()[batch.valid_index].tolist() == flat
        assert batch.position_ids.flatten()[batch.valid_index].tolist() == [
            place for row in rows for place in range(len(row))
        ]
        valid = batch.attention_mask.bool()
        assert torch.equal(valid.flatten().nonzero().squeeze(-1), batch.valid_index)
        assert torch.equal(batch.labels, torch.where(valid, batch.input_ids, -100))
        assert (batch.input_ids[~valid] == pad).all()
        assert (batch.position_ids >= 0).all()
        assert find_fault(batch, 10) is None

    def test_positions_under_left_padding_count_valid_tokens(self):
        batch = collate(make((5, 6, 7, 8), (8, 9)), 2, side="left")
        assert batch.input_ids.tolist() == [[5, 6, 7, 8], [2, 2, 8, 9]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
        assert batch.valid_index.tolist() == [0, 1, 2, 3, 6, 7]


def test_a_batch_of_tensors_names_its_rows_by_number_unless_told():
    ids, mask = torch.tensor([[5, 6], [7, 2]]), torch.tensor([[1, 1], [1, 0]])
    assert batch_from_tensors(ids, mask).sample_ids == ("0", "1")
    assert batch_from_tensors(ids, mask, ("a", "b")).sample_ids == ("a", "b")
    assert not batch_from_tensors(ids[:1], mask[:1]).padded


class TestScored:
    """Positions whose next token is predicted."""

    @settings(deadline=None, max_examples=60)
    @given(rows=ROWS, side=st.sampled_from(["left", "right"]), extra=st.integers(0, 3))
    def test_every_token_but_a_rows_first_is_predicted_from_the_last(self, rows, side, extra):
        batch = collate(make(*rows), 2, side=side, length=max(map(len, rows)) + extra)
        assert batch.scored == len(batch.scored_index) == sum(len(row) - 1 for row in rows)
        flat = batch.labels.flatten()
        assert flat[batch.scored_index + 1].tolist() == [token for row in rows for token in row[1:]]
        assert batch.input_ids.flatten()[batch.scored_index].tolist() == [
            token for row in rows for token in row[:-1]
        ]

    def test_a_prompt_predicts_its_completion_and_is_not_predicted(self):
        batch = collate(make((5, 6, 7, 8), (9, 4)), 2)
        labels = torch.tensor([[-100, -100, 7, 8], [-100, 4, -100, -100]])
        masked = replace(batch, labels=labels)
        assert batch.scored_index.tolist() == [0, 1, 2, 4]
        assert masked.scored_index.tolist() == [1, 2, 4]  # made anew for the changed batch
        assert replace(batch, labels=torch.full_like(labels, -100)).scored == 0

    def test_documents_that_share_a_row_predict_nothing_of_one_another(self):
        batch = collate(make((5, 6, 7, 8, 9), (4, 3)), 2)
        packed = replace(batch, position_ids=torch.tensor([[0, 1, 2, 0, 1], [0, 1, 1, 1, 1]]))
        assert packed.scored_index.tolist() == [0, 1, 3, 5]

    def test_targets_further_ahead_stay_in_their_row_and_document(self):
        labels = torch.tensor([[1, 2, 3, -100, 5], [6, 7, 8, -100, -100]])
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        assert [target_index(labels, mask, ahead=ahead).tolist() for ahead in range(1, 7)] == [
            [0, 1, 3, 5, 6],
            [0, 2, 5],
            [1],
            [0],
            [],
            [],
        ]
        positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 2, 2]])
        assert target_index(labels, mask, positions, ahead=2).tolist() == [0, 5]


def test_moving_a_batch_keeps_what_it_holds(batch):
    moved = batch.to(torch.device("cpu"))
    assert moved.sample_ids == batch.sample_ids
    assert "scored_index" in vars(moved)  # made on the host, so that no device is asked
    names = ("input_ids", "attention_mask", "position_ids", "labels", "valid_index", "scored_index")
    for name in names:
        assert torch.equal(getattr(moved, name), getattr(batch, name))
    # the meta device shows that every tensor moves
    assert {
        t.device.type
        for t in vars(batch.to(torch.device("meta"))).values()
        if isinstance(t, torch.Tensor)
    } == {"meta"}


@settings(deadline=None, max_examples=40)
@given(count=st.integers(0, 11), size=st.integers(1, 4))
def test_batches_keep_order_and_lose_no_sample(count, size):
    samples = make(*((number, 1) for number in range(count)))
    made = list(batches(iter(samples), size))
    assert [name for batch in made for name in batch.sample_ids] == [s.id for s in samples]
    assert all(len(batch.sample_ids) == size for batch in made[:-1])
    assert all(len(batch.sample_ids) > 0 for batch in made)


class TestFindFault:
    GOOD = batch_from_tensors(
        torch.tensor([[5, 6, 7], [8, 9, 2]]), torch.tensor([[1, 1, 1], [1, 1, 0]]), ("a@0", "b@8")
    )

    def changed(self, name: str, row: int, column: int, value: int) -> Batch:
        tensor = getattr(self.GOOD, name).clone()
        tensor[row, column] = value
        return replace(self.GOOD, **{name: tensor})

    def test_finds_nothing_in_a_good_batch(self):
        assert find_fault(self.GOOD, 10) is None

    @pytest.mark.parametrize(
        ("name", "value", "fault"),
        [
            *(("input_ids", value, "token id {} outside") for value in (10, -1, -100, 2**40)),
            *(("labels", value, "label {} outside") for value in (10, -1, -99, -101)),
            *(("attention_mask", value, "attention mask {} at") for value in (2, -1)),
        ],
    )
    def test_a_value_that_cannot_be_is_located(self, name, value, fault):
        message = str(find_fault(self.changed(name, 1, 2, value), 10))
        assert message.startswith(fault.format(value))
        assert "at row 1, position 2 of sample b@8" in message
        assert ("[0, 10)" in message) == (name != "attention_mask")

    def test_a_row_without_a_valid_token_is_named(self):
        mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
        batch = batch_from_tensors(self.GOOD.input_ids, mask, ("a@0", "b@8"))
        assert find_fault(batch, 10) == "no valid token in row 1, sample b@8"

    @pytest.mark.parametrize(
        ("ids", "mask"), [((2, 3), (2, 4)), ((6,), (6,)), ((1, 2, 3), (1, 2, 3)), ((0, 3), (0, 3))]
    )
    def test_another_shape_is_shown(self, ids, mask):
        tensors = {
            "input_ids": torch.ones(ids, dtype=torch.int64),
            "attention_mask": torch.ones(mask, dtype=torch.int64),
        }
        fault = find_fault(replace(self.GOOD, **tensors), 10)
        assert fault == f"shapes {ids} of ids and {mask} of mask, expected [B, T] twice"

    def test_the_first_of_several_is_the_one_reported(self):
        batch = self.changed("input_ids", 0, 1, 99)
        batch.input_ids[1, 1] = 98
        assert find_fault(batch, 10).startswith("token id 99")
