"""Packing: every token once, in rows that fit, with documents that know where they begin."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.batch import IGNORE_INDEX, Batch, Sample, collate, find_fault
from npt.data.packing import pack

PAD = 99
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=30)
SIDES = st.sampled_from(["left", "right"])


def documents(sizes: list[int], labelled: bool = True) -> list[Sample]:
    """Samples of the sizes; every second one has labels, -100 on its first half. No token comes
    twice.
    """
    made, token = [], 100
    for number, size in enumerate(sizes):
        ids = tuple(range(token, token + size))
        labels = (
            (*[IGNORE_INDEX] * (size // 2), *ids[size // 2 :]) if labelled and number % 2 else None
        )
        made.append(Sample(f"d{number}@0", ids, labels))
        token += size
    return made


def of_document(batch: Batch, row: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Ids, positions and labels of each document of a row, by what the batch says of its
    documents.
    """
    valid = batch.attention_mask[row].bool()
    number = (
        batch.documents[row]
        if batch.documents is not None
        else torch.zeros_like(valid, dtype=torch.int64)
    )
    columns = [
        (valid & (number == i)).nonzero().squeeze(-1) for i in range(int(number[valid].max()) + 1)
    ]
    return [
        tuple(
            tensor[row, c].tolist()
            for tensor in (batch.input_ids, batch.position_ids, batch.labels)
        )
        for c in columns
    ]


class TestPack:
    @settings(deadline=None, max_examples=100)
    @given(sizes=SIZES, more=st.integers(0, 20))
    def test_every_token_comes_once_in_rows_that_fit(self, sizes, more):
        samples = documents(sizes)
        rows = pack(samples, max(sizes) + more)
        assert all(len(row.input_ids) <= max(sizes) + more for row in rows)
        assert sorted(token for row in rows for token in row.input_ids) == [
            token for s in samples for token in s.input_ids
        ]
        by_name = {s.id: s for s in samples}
        for row in rows:
            assert sum(row.lengths) == len(row.input_ids) == len(row.labels)
            start = 0
            for name, length in zip(row.id.split("+"), row.lengths, strict=True):
                sample = by_name.pop(name)
                assert row.input_ids[start : start + length] == sample.input_ids
                assert row.labels[start] == IGNORE_INDEX  # nothing is before it to predict it
                assert (
                    row.labels[start + 1 : start + length]
                    == (sample.labels or sample.input_ids)[1:]
                )
                start += length
        assert not by_name

    @settings(deadline=None, max_examples=50)
    @given(sizes=SIZES, max_length=st.integers(12, 40))
    def test_no_two_rows_would_fit_into_one(self, sizes, max_length):
        rows = sorted(len(row.input_ids) for row in pack(documents(sizes), max_length))
        assert len(rows) == 1 or rows[0] + rows[1] > max_length

    def test_the_longest_come_first_and_each_goes_where_it_fits_best(self):
        rows = pack(documents([2, 7, 5, 3, 1]), 8)
        assert [row.id for row in rows] == ["d1@0+d4@0", "d2@0+d3@0", "d0@0"]
        assert [row.lengths for row in rows] == [(7, 1), (5, 3), (2,)]


class TestCollate:
    @settings(deadline=None, max_examples=100)
    @given(sizes=SIZES, side=SIDES, extra=st.integers(0, 4))
    def test_every_document_keeps_its_tokens_positions_and_labels(self, sizes, side, extra):
        samples = documents(sizes)
        rows = pack(samples, 16)
        width = max(len(row.input_ids) for row in rows) + extra
        batch = collate(rows, PAD, side=side, length=width)
        found = [document for row in range(len(rows)) for document in of_document(batch, row)]
        expected = [
            (
                list(s.input_ids),
                list(range(len(s.input_ids))),
                [IGNORE_INDEX, *(s.labels or s.input_ids)[1:]],
            )
            for s in samples
        ]
        assert sorted(found) == sorted(expected)
        padding = ~batch.attention_mask.bool()
        assert (batch.input_ids[padding] == PAD).all() and (
            batch.labels[padding] == IGNORE_INDEX
        ).all()
        assert batch.tokens == sum(sizes)
        assert find_fault(batch, 1000) is None

    def test_a_batch_is_the_one_written_by_hand(self):
        rows = [
            Sample("a+b", (5, 6, 7, 8, 9), (-100, 6, -100, 8, 9), (2, 3)),
            Sample("c", (3, 4), (-100, 4), (2,)),
        ]
        right, left = (collate(rows, PAD, side=side, length=6) for side in ("right", "left"))
        assert right.input_ids.tolist() == [[5, 6, 7, 8, 9, PAD], [3, 4, PAD, PAD, PAD, PAD]]
        assert right.labels.tolist() == [
            [-100, 6, -100, 8, 9, -100],
            [-100, 4, -100, -100, -100, -100],
        ]
        assert left.input_ids.tolist() == [[PAD, 5, 6, 7, 8, 9], [PAD, PAD, PAD, PAD, 3, 4]]
        for batch, start, end in ((right, 0, 2), (left, 1, 6)):
            first, second = slice(start, start + 5), slice(end - 2, end)
            assert batch.position_ids[0, first].tolist() == [0, 1, 0, 1, 2]
            assert batch.position_ids[1, second].tolist() == [0, 1]
            assert batch.documents[0, first].tolist() == [0, 0, 1, 1, 1]
            assert (batch.position_ids >= 0).all()
