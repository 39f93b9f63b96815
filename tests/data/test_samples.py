import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npt
from npt.batch import Sample
from npt.data.encoding import lost
from npt.data.samples import Samples, cut, within
from npt.errors import DataError
from npt.evaluation.heldout import evaluation_samples, spread

# The tokenizer fixture keeps no state, so that one serves all examples of a property.
SHARED_TOKENIZER = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TEXTS = [
    {"text": f"document {number}: " + "abcdefghij"[number % 10] * (number % 23)}
    for number in range(60)
]


def held_out(records, tokenizer, config, limit):
    held = (sample for sample in cut(records, tokenizer, config) if sample.heldout)
    return list(itertools.islice(held, limit))


def config(**settings) -> npt.DataConfig:
    return npt.DataConfig(**{"max_length": 8, **settings})


def tokens(samples) -> list[tuple[int, ...]]:
    return [sample.input_ids for sample in samples]


class Stream:
    """Records without a length; counts how many were read."""

    def __init__(self, records):
        self.records, self.read = records, 0

    def __iter__(self) -> Iterator:
        for record in self.records:
            self.read += 1
            yield record


class TestCut:
    @SHARED_TOKENIZER
    @given(texts=st.lists(st.text(max_size=40), max_size=40), max_length=st.integers(2, 9))
    def test_no_token_is_lost_but_a_single_last_one(self, tokenizer, texts, max_length):
        found: dict[str, list[int]] = {}
        for sample in cut([{"text": t} for t in texts], tokenizer, config(max_length=max_length)):
            name, start = sample.id.split("@")
            assert 2 <= len(sample.input_ids) <= max_length
            assert int(start) == len(found.setdefault(name, []))
            found[name] += sample.input_ids
        for number, text in enumerate(texts):
            expected = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] if text else []
            if len(expected) % max_length == 1:
                expected = expected[:-1]
            assert found.get(str(number), []) == expected

    @SHARED_TOKENIZER
    @given(ids=st.lists(st.integers(0, 127), max_size=30), max_length=st.integers(2, 9))
    def test_token_ids_are_taken_as_they_are_and_get_no_end_token(self, tokenizer, ids, max_length):
        got = tokens(cut([{"input_ids": ids}], tokenizer, config(max_length=max_length)))
        windows = [tuple(ids[i : i + max_length]) for i in range(0, len(ids), max_length)]
        assert got == [w for w in windows if len(w) > 1]

    def test_the_end_token_closes_each_text_once(self, tokenizer):
        ends = [
            sample.input_ids[-1]
            for sample in cut([{"text": "abc"}, {"text": "de"}], tokenizer, config())
        ]
        assert ends == [tokenizer.eos_token_id] * 2

        class ClosingTokenizer(type(tokenizer)):
            def __call__(self, texts, **_):
                return {
                    "input_ids": [
                        [*ids, self.eos_token_id] for ids in super().__call__(texts)["input_ids"]
                    ]
                }

        assert tokens(cut([{"text": "abc"}], ClosingTokenizer(), config())) == tokens(
            cut([{"text": "abc"}], tokenizer, config())
        )

    def test_is_lazy(self, tokenizer):
        stream = Stream([{"text": "abc"}] * 1000)
        next(cut(stream, tokenizer, config()))
        assert stream.read == 1

    @pytest.mark.parametrize(
        "record", [{"input_ids": None}, {"input_ids": "abc"}, {"input_ids": [[1, 2]]}, "text", None]
    )
    def test_a_record_that_is_none_is_refused_by_its_position(self, tokenizer, record):
        with pytest.raises(DataError, match=r"record 1\b"):
            list(cut([{"text": "x"}, record], tokenizer, config()))

    def test_a_real_tokenizer_neither_cuts_nor_warns(self, caplog):
        _, tokenizer = npt.load_base("tiny", device="cpu")
        text = "value = 1\n" * 2000
        samples = list(cut([{"text": text}], tokenizer, config(max_length=256)))
        assert (
            tokenizer.decode([i for s in samples for i in s.input_ids], skip_special_tokens=True)
            == text
        )
        assert samples[-1].input_ids[-1] == tokenizer.eos_token_id
        assert not caplog.records


class TestHeldOut:
    def test_depends_on_the_tokens_alone_and_for_good(self):
        """A sample that changed sides between versions would leak into the evaluation."""
        held = [i for i in range(100) if Sample("", (0, i, 1)).heldout]
        assert held == [13, 33, 54, 97]
        assert Sample("x@0", (0, 13, 1)).heldout

    def test_one_sample_in_twenty(self):
        share = sum(Sample("", (number,)).heldout for number in range(4000)) / 4000
        # four standard errors of a share of 1/20 among 4000
        assert share == pytest.approx(1 / 20, abs=0.014)

    @pytest.mark.parametrize("make", [list, Stream], ids=["list", "stream"])
    def test_is_disjoint_from_training_and_complete_with_it(self, tokenizer, make):
        training = set(tokens(Samples(make(TEXTS), tokenizer, config(), seed=0).epoch(0)))
        heldout = set(tokens(held_out(make(TEXTS), tokenizer, config(), limit=10_000)))
        assert training
        assert heldout
        assert not training & heldout
        assert training | heldout == set(tokens(cut(TEXTS, tokenizer, config())))

    def test_is_left_in_where_the_evaluation_has_its_own_data(self, tokenizer):
        samples = Samples(TEXTS, tokenizer, config(), seed=0, hold_out=False)
        assert sorted(tokens(samples.epoch(0))) == sorted(tokens(cut(TEXTS, tokenizer, config())))


class TestSpread:
    def test_draws_distinct_samples_and_the_same_ones_every_time(self):
        pool = [Sample(str(i), (i, i)) for i in range(500)]
        drawn = spread(iter(pool), 10)
        assert len(set(drawn)) == 10
        assert set(drawn) <= set(pool)
        assert drawn == spread(pool, 10)
        assert drawn != pool[:10]
        assert spread(pool[:7], 7) == spread(pool[:7], 8) == pool[:7] and spread([], 3) == []

    def test_reads_a_bounded_part_of_an_endless_stream(self):
        read = []
        endless = (read.append(i) or Sample(str(i), (i, i)) for i in range(10**9))
        assert len(spread(endless, 2)) == 2
        assert len(read) == 128


class TestSequence:
    def test_every_epoch_holds_the_same_samples_in_another_order(self, tokenizer):
        samples = Samples(TEXTS, tokenizer, config(), seed=0)
        epochs = [list(samples.epoch(number)) for number in range(3)]
        assert samples.count() == len(epochs[0]) > 60
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert all(sorted(tokens(epoch)) == sorted(tokens(epochs[0])) for epoch in epochs)

    def test_the_seed_fixes_the_order(self, tokenizer):
        one, same, other = (Samples(TEXTS, tokenizer, config(), seed=seed) for seed in (3, 3, 4))
        for number in (1, 0, 1):
            assert list(one.epoch(number)) == list(same.epoch(number)) != list(other.epoch(number))

    def test_num_samples_bounds_an_epoch_to_a_drawn_part(self, tokenizer):
        everything = Samples(TEXTS, tokenizer, config(), seed=0)
        few, others = (
            Samples(TEXTS, tokenizer, config(num_samples=10), seed=seed) for seed in (0, 1)
        )
        assert few.count() == len(list(few.epoch(0))) == 10
        assert set(few.epoch(0)) == set(few.epoch(1)) < set(everything.epoch(0))
        assert set(tokens(few.epoch(0))) != set(tokens(others.epoch(0)))
        assert (
            Samples(TEXTS, tokenizer, config(num_samples=10**6), seed=0).count()
            == everything.count()
        )

    def test_no_more_is_tokenised_than_shows_that_there_is_a_sample(self, tokenizer):
        seen = []

        class CountingTokenizer(type(tokenizer)):
            def __call__(self, texts, **options):
                seen.extend(text for text in texts if text.startswith("document"))
                return super().__call__(texts, **options)

        Samples(TEXTS * 10, CountingTokenizer(), config(), seed=0)
        assert 0 < len(seen) <= 32

    def test_a_record_is_named_by_its_number_in_the_data(self, tokenizer):
        records = [{"input_ids": [number, 100]} for number in range(40)]
        for sample in Samples(records, tokenizer, config(), seed=0, hold_out=False).epoch(0):
            assert sample.id == f"{sample.input_ids[0]}@0"

    def test_a_broken_record_is_named_by_its_place_in_the_data(self, tokenizer):
        records = [{"text": "good"}] * 40
        records[17] = {"body": "bad"}
        with pytest.raises(DataError, match=r"record 17 has no column 'text'"):
            list(Samples(records, tokenizer, config(), seed=0, hold_out=False).epoch(0))

    def test_a_datasets_object_is_a_sequence(self, tokenizer):
        datasets = pytest.importorskip("datasets")
        samples = Samples(datasets.Dataset.from_list(TEXTS), tokenizer, config(), seed=0)
        assert tokens(samples.epoch(1)) == tokens(
            Samples(TEXTS, tokenizer, config(), seed=0).epoch(1)
        )

    @pytest.mark.parametrize(
        ("records", "came"),
        [
            ([], "in the data"),
            ([{"text": ""}] * 40, r"in 40 records: 40 skipped \(empty text\)"),
            ([{"input_ids": [4]}], r"in 1 records: 1 skipped \(fewer than two tokens\)"),
            ([{"prompt": "a", "completion": " "}], r"in 1 records: 1 skipped \(empty completion\)"),
            (
                [{"input_ids": [0, 13, 1]}, {"text": ""}],
                r"in 2 records: 1 held out, 1 skipped \(empty text\)",
            ),
        ],
    )
    @pytest.mark.parametrize("packing", [False, True])
    def test_data_without_a_sample_are_refused_with_what_became_of_them(
        self, tokenizer, records, came, packing
    ):
        with pytest.raises(DataError, match=f"no sample to train on {came}; check --dataset_name"):
            Samples(records, tokenizer, config(packing=packing), seed=0)


class TestStream:
    def test_is_read_anew_for_every_epoch_and_gives_every_sample_once(self, tokenizer):
        stream = Stream(TEXTS)
        samples = Samples(stream, tokenizer, config(), seed=0, hold_out=False)
        assert samples.count() is None and stream.read == 0
        epochs = [tokens(samples.epoch(number)) for number in (0, 1)]
        assert (
            sorted(epochs[0])
            == sorted(epochs[1])
            == sorted(tokens(cut(TEXTS, tokenizer, config())))
        )
        assert epochs[0] != epochs[1]
        assert stream.read == 2 * len(TEXTS)

    def test_is_shuffled_within_blocks_that_stay_in_order(self, tokenizer, monkeypatch):
        monkeypatch.setattr("npt.data.samples.SHUFFLE_BLOCK", 8)
        monkeypatch.setattr("npt.data.samples._RECORDS_AT_ONCE", 4)
        records = [{"input_ids": [number, 100], "id": str(number)} for number in range(40)]
        order = [
            int(s.id.split("@")[0])
            for s in Samples(Stream(records), tokenizer, config(), seed=0, hold_out=False).epoch(0)
        ]
        blocks = [order[start : start + 8] for start in range(0, 40, 8)]
        assert [sorted(block) for block in blocks] == [
            list(range(start, start + 8)) for start in range(0, 40, 8)
        ]
        assert all(block != sorted(block) for block in blocks)

    def test_reads_a_block_ahead_and_no_more(self, tokenizer, monkeypatch):
        monkeypatch.setattr("npt.data.samples.SHUFFLE_BLOCK", 40)
        stream = Stream([{"text": "abc"}] * 1000)
        next(Samples(stream, tokenizer, config(), seed=0, hold_out=False).epoch(0))
        assert stream.read == 64  # records are read 32 at a time

    def test_a_spent_generator_serves_no_second_epoch(self, tokenizer):
        samples = Samples((record for record in TEXTS), tokenizer, config(), seed=0)
        assert len(list(samples.epoch(0))) > 60
        assert list(samples.epoch(1)) == []


class TestPacked:
    @pytest.mark.parametrize("make", [list, Stream], ids=["list", "stream"])
    def test_rows_hold_the_same_documents_and_are_fewer(self, tokenizer, make):
        plain, packed = (
            Samples(make(TEXTS), tokenizer, config(max_length=40, packing=packing), seed=0)
            for packing in (False, True)
        )
        rows, documents = list(packed.epoch(0)), list(plain.epoch(0))
        assert sorted(name for row in rows for name in row.id.split("+")) == sorted(
            s.id for s in documents
        )
        assert len(rows) < len(documents)
        assert all(len(row.input_ids) <= 40 for row in rows)
        if make is list:
            assert packed.count() == len(rows) and plain.count() == len(documents)

    def test_num_samples_are_counted_before_packing(self, tokenizer):
        samples = Samples(
            TEXTS, tokenizer, config(max_length=40, packing=True, num_samples=10), seed=0
        )
        rows = list(samples.epoch(0))
        assert sum(len(row.lengths) for row in rows) == 10
        assert samples.count() == len(rows)

    def test_what_is_held_out_is_told_before_packing(self, tokenizer):
        held = {s.id for s in held_out(TEXTS, tokenizer, config(max_length=40), limit=100)}
        rows = Samples(TEXTS, tokenizer, config(max_length=40, packing=True), seed=0).epoch(0)
        assert held and not held & {name for row in rows for name in row.id.split("+")}


class TestCounts:
    def test_every_pass_over_the_records_counts(self, tokenizer):
        records = [
            *TEXTS,
            {"text": ""},
            {"prompt": "a" * 20, "completion": "b"},
            {"prompt": "a", "completion": ""},
        ]
        samples = Samples(records, tokenizer, config(), seed=0, hold_out=False)
        assert samples.counts.records == 0  # looking whether there is anything is no pass
        for epoch in (1, 2):
            made = list(samples.epoch(epoch))
            assert samples.counts.records == epoch * len(records)
            assert samples.counts.samples == epoch * len(made)
            assert samples.counts.tokens == epoch * sum(len(s.input_ids) for s in made)
            assert samples.counts.skipped == {"empty text": epoch, "empty completion": epoch}
            assert samples.counts.cut_prompts == epoch
        assert (
            lost(samples.counts)
            == "2 prompts cut to --max_length, 2 skipped (empty completion), 2 skipped (empty text)"
        )


class TestEvaluation:
    def test_samples_with_ids_outside_the_vocabulary_are_left_out(self):
        good, with_mask = Sample("good", (5, 6)), Sample("with mask", (5, 6), (-100, 6))
        bad = [
            Sample("id", (5, 128)),
            Sample("negative", (5, -1)),
            Sample("label", (5, 6), (-100, 128)),
            Sample("low", (5, 6), (-1, 6)),
        ]
        assert list(within([good, *bad, with_mask], 128)) == [good, with_mask]

    def test_prompts_and_completions_are_held_out_like_text(self, tokenizer):
        records = [
            {"prompt": f"question {i}", "completion": f"answer {i % 7}", "id": str(i)}
            for i in range(200)
        ]
        samples, heldout = evaluation_samples(records, tokenizer, config(max_length=30), 100, 128)
        trained = {
            s.id for s in Samples(records, tokenizer, config(max_length=30), seed=0).epoch(0)
        }
        assert heldout and 0 < len(samples) < 30
        assert not trained & {s.id for s in samples}
        assert all(s.labels is not None and -100 in s.labels for s in samples)

    def test_packing_changes_nothing_about_what_is_evaluated(self, tokenizer):
        plain, packed = (
            evaluation_samples(TEXTS, tokenizer, config(packing=packing), 100, 128)[0]
            for packing in (False, True)
        )
        assert plain == packed and all(s.lengths is None for s in packed)
