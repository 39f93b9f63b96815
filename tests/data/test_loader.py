"""The loader: the same batches from any position on, replay in its share, and a thread that works
ahead and leaves no thread.
"""

import itertools
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npt
from npt.batch import Batch
from npt.data import samples as samples_module
from npt.data.samples import Loader, Position, Samples, prefetched
from npt.errors import DataError

SHARED = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks out of little data."""
    monkeypatch.setattr(samples_module, "SHUFFLE_BLOCK", 8)
    monkeypatch.setattr(samples_module, "_RECORDS_AT_ONCE", 3)


class Stream:
    """Records without a length, readable again and again; with `skip` as a hub's stream has it, or
    without.
    """

    def __init__(self, records: list[Any]):
        self.records = records

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)


class SkippingStream(Stream):
    def skip(self, count: int) -> "SkippingStream":
        return SkippingStream(self.records[count:])


TENSORS = ["input_ids", "attention_mask", "position_ids", "labels", "valid_index", "scored_index"]
KINDS = {"list": list, "stream": Stream, "hub stream": SkippingStream}


def records(count: int, name: str = "r") -> list[dict[str, Any]]:
    """Records of which every fifth is empty and every seventh is cut to several samples."""
    return [
        {
            "id": f"{name}{i}",
            "text": "" if i % 5 == 3 else chr(97 + i % 26) * (3 + (i * i) % 5 + 20 * (i % 7 == 6)),
        }
        for i in range(count)
    ]


def make_loader(tokenizer: Any, data: Any, replay: Any = None, **options: Any) -> Loader:
    """A loader anew, as a process that resumes a run makes it."""
    share = options.pop("replay_share", 0.0)
    data_options = {
        name: options.pop(name) for name in ("packing", "num_samples") if name in options
    }
    config = npt.DataConfig(max_length=10, **data_options)
    samples = Samples(data, tokenizer, config, seed=3)
    if share:
        mixed = Samples(replay, tokenizer, npt.DataConfig(max_length=10), seed=4)
        options |= {"replay": mixed, "share": share}
    return Loader(samples, options.pop("batch_size", 2), seed=3, **options)


def content(loaded: tuple[Batch, Position]) -> tuple[Any, ...]:
    batch, position = loaded
    documents = None if batch.documents is None else batch.documents.tolist()
    tensors = [getattr(batch, name).tolist() for name in TENSORS]
    return position, batch.sample_ids, documents, *tensors


OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 5),
        "epochs": st.integers(1, 3),
        "replay_share": st.sampled_from([0.0, 0.2, 0.6]),
        "packing": st.booleans(),
        "num_samples": st.none() | st.integers(1, 50),
    }
)


class TestPosition:
    @SHARED
    @given(
        count=st.integers(4, 60),
        kind=st.sampled_from(sorted(KINDS)),
        replayed=st.integers(4, 20),
        replay_kind=st.sampled_from(sorted(KINDS)),
        where=st.floats(0, 1),
        options=OPTIONS,
    )
    def test_from_any_position_on_the_rest_is_the_same(
        self, tokenizer, count, kind, replayed, replay_kind, where, options
    ):
        def anew() -> Loader:
            replay = KINDS[replay_kind](records(replayed, "p"))
            return make_loader(tokenizer, KINDS[kind](records(count)), replay, **options)

        whole = [content(loaded) for loaded in anew().batches()]
        assert whole
        taken = round(where * len(whole))
        position = Position() if taken == 0 else whole[taken - 1][0]
        saved = Position.from_dict(json.loads(json.dumps(position.as_dict())))
        assert saved == position
        assert [content(loaded) for loaded in anew().batches(saved)] == whole[taken:]

    def test_a_position_is_the_same_in_every_version(self, tokenizer):
        """A saved run is resumed by these: other values here would repeat and leave out data of
        every run that was saved.
        """
        ahead = prefetched(
            make_loader(tokenizer, records(40), records(9, "p"), replay_share=0.3).batches()
        )
        loaded = list(itertools.islice(ahead, 6))
        ahead.close()
        assert [batch.sample_ids for batch, _ in loaded] == [
            ("r6@10", "r22@0"),
            ("p6@0", "r11@0"),
            ("r39@0", "r6@20"),
            ("r30@0", "r6@0"),
            ("p6@20", "p0@0"),
            ("r25@0", "p7@0"),
        ]
        taken = zip((2, 3, 5, 7, 7, 8), (0, 1, 1, 1, 3, 4), strict=True)
        assert [position.as_dict() for _, position in loaded] == [
            {
                "epoch": 0,
                "place": [0, 0, first],
                "replay_epoch": 0,
                "replay_place": [0, 0, replayed],
                "drawn": 2 * number,
            }
            for number, (first, replayed) in enumerate(taken, start=1)
        ]


class TestBatches:
    @SHARED
    @given(count=st.integers(4, 40), batch_size=st.integers(1, 5), epochs=st.integers(1, 3))
    def test_an_epoch_holds_every_sample_once_and_no_batch_crosses_it(
        self, tokenizer, count, batch_size, epochs
    ):
        loader = make_loader(tokenizer, records(count), batch_size=batch_size, epochs=epochs)
        expected = sorted(s.id for s in loader.samples.epoch(0))
        found: dict[int, list[str]] = {}
        for batch, position in loader.batches():
            assert len(batch.sample_ids) <= batch_size
            found.setdefault(position.place.epoch, []).extend(batch.sample_ids)
        assert list(found) == list(range(epochs))
        assert all(sorted(ids) == expected for ids in found.values())

    @SHARED
    @given(count=st.integers(4, 40), limit=st.integers(1, 30), options=OPTIONS)
    def test_they_are_counted_before_they_are_made(self, tokenizer, count, limit, options):
        loader = make_loader(tokenizer, records(count), records(9, "p"), **options)
        made = sum(1 for _ in loader.batches())
        assert loader.count() == made
        assert loader.count(limit) == min(limit, made)

    @SHARED
    @given(
        count=st.integers(12, 40),
        begun=st.integers(1, 9),
        epochs=st.integers(1, 3),
        share=st.sampled_from([0.0, 0.3]),
        limit=st.integers(1, 30),
    )
    def test_a_run_begun_after_some_samples_has_them_in_later_epochs(
        self, tokenizer, count, begun, epochs, share, limit
    ):
        loader = make_loader(
            tokenizer, records(count), records(9, "p"), epochs=epochs, replay_share=share
        )
        first = list(loader.samples.walk())
        begun = min(begun, len(first) - 1)
        start = Position(place=first[begun - 1][1], begun=begun)
        made = list(loader.batches(start))
        own = [id for batch, _ in made for id in batch.sample_ids if not id.startswith("p")]
        later = [s.id for epoch in range(1, epochs) for s in loader.samples.epoch(epoch)]
        assert own == [sample.id for sample, _ in first[begun:]] + later
        assert loader.count(begun=begun) == len(made) and loader.count(limit, begun=begun) == min(
            limit, len(made)
        )
        positions = [position for _, position in made]
        assert positions == [
            Position.from_dict(json.loads(json.dumps(each.as_dict()))) for each in positions
        ]
        assert {position.begun for position in positions} == {begun}

    def test_of_a_stream_they_cannot_be_counted(self, tokenizer):
        assert make_loader(tokenizer, Stream(records(20))).count() is None
        assert make_loader(tokenizer, Stream(records(20))).count(3) is None

    def test_counting_stops_at_its_limit_however_many_epochs_there_are(self, tokenizer):
        assert (
            make_loader(
                tokenizer, records(20), records(9, "p"), epochs=10**12, replay_share=0.5
            ).count(100)
            == 100
        )


class TestReplay:
    def origins(self, loader: Loader) -> list[str]:
        return [name[0] for batch, _ in loader.batches() for name in batch.sample_ids]

    @pytest.mark.parametrize("share", [0.05, 0.2, 0.75])
    def test_its_share_is_the_one_that_was_asked_for(self, tokenizer, share):
        data = [{"input_ids": [5, 6, i % 100, i // 100]} | {"id": f"r{i}"} for i in range(1500)]
        loader = make_loader(
            tokenizer,
            data,
            [{**r, "id": f"p{i}"} for i, r in enumerate(data[:50])],
            replay_share=share,
        )
        origins = self.origins(loader)
        error = math.sqrt(share * (1 - share) / len(origins))
        assert abs(origins.count("p") / len(origins) - share) < 4 * error
        assert origins.count("r") == loader.samples.count()  # nothing of the first source gives way

    def test_it_goes_round_in_another_order_each_time(self, tokenizer):
        loader = make_loader(tokenizer, records(60), records(12, "p"), epochs=2, replay_share=0.6)
        names = [n for batch, _ in loader.batches() for n in batch.sample_ids if n.startswith("p")]
        once = sorted(s.id for s in loader.replay.epoch(0))
        rounds = [names[i : i + len(once)] for i in range(0, len(names) - len(once) + 1, len(once))]
        assert len(rounds) > 3
        assert all(sorted(round) == once for round in rounds)
        assert len(set(map(tuple, rounds))) > 1

    def test_nothing_to_replay_is_an_error_and_no_endless_search(self, tokenizer):
        with pytest.raises(DataError, match="replay data: no sample came from it"):
            list(
                make_loader(
                    tokenizer, records(20), Stream([{"text": ""}]), replay_share=0.5
                ).batches()
            )


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "npt-data"]


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "npt-data":
            thread.join(timeout=30)
    assert threads() == []


class TestAhead:
    def test_items_come_in_order_and_the_thread_ends_with_them(self):
        ahead = prefetched(iter(range(100)), depth=3)
        assert list(ahead) == list(range(100))
        ahead.close()
        ahead.close()
        assert threads() == []

    def test_it_is_never_more_than_its_depth_ahead(self):
        made: list[int] = []
        full = threading.Event()

        def items() -> Iterator[int]:
            for i in range(100):
                made.append(i)
                if i == 5:
                    full.set()
                yield i

        ahead = prefetched(items(), depth=4)
        assert next(ahead) == 0
        assert full.wait(timeout=30)
        ahead.close()
        assert made == [0, 1, 2, 3, 4, 5]  # one taken, four ready, one waits for room

    def test_an_error_comes_in_its_turn(self):
        def breaking() -> Iterator[int]:
            yield 1
            yield 2
            raise DataError("line 3 is broken")

        ahead = prefetched(breaking())
        seen = []
        with pytest.raises(DataError, match="line 3 is broken"):
            for item in ahead:
                seen.append(item)
        assert seen == [1, 2]
        ahead.close()
        assert threads() == []

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
    def test_no_error_is_lost(self, error):
        def breaking() -> Iterator[int]:
            raise error
            yield 1

        ahead = prefetched(breaking())
        with pytest.raises(error):
            list(ahead)
        ahead.close()

    def test_a_stop_ends_the_iteration_while_it_waits(self, monkeypatch):
        monkeypatch.setattr(samples_module, "_CLOSE_SECONDS", 0.05)
        stop, blocked, release = threading.Event(), threading.Event(), threading.Event()

        def hanging() -> Iterator[int]:
            yield 1
            blocked.set()
            release.wait(timeout=60)

        items = prefetched(hanging(), stop=stop.is_set)
        assert next(items) == 1
        assert blocked.wait(timeout=30)
        threading.Timer(0.2, stop.set).start()
        assert next(items, "ended") == "ended"
        release.set()
        join_threads()

    def test_what_hangs_is_not_waited_for_for_ever(self, monkeypatch):
        monkeypatch.setattr(samples_module, "_CLOSE_SECONDS", 0.05)
        release = threading.Event()

        def hanging() -> Iterator[int]:
            yield 1
            release.wait(timeout=60)

        ahead = prefetched(hanging())
        next(ahead)
        ahead.close()
        assert threads() == ["npt-data"]
        release.set()
        join_threads()


def test_batches_are_pinned_by_the_prefetchers_thread_unchanged(tokenizer, monkeypatch) -> None:
    """Without a GPU there is no pinned memory: what asks for it is recorded, in whose thread, and
    copied.
    """
    threads = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    plain = [batch for batch, _ in make_loader(tokenizer, records(9)).batches()]
    assert threads == []
    loader = make_loader(tokenizer, records(9))
    loader.pin = True
    ahead = prefetched(loader.batches())
    pinned = [batch for batch, _ in ahead]
    ahead.close()
    assert set(threads) == {"npt-data"} and len(plain) == len(pinned) > 1
    for one, other in zip(pinned, plain, strict=True):
        assert one.sample_ids == other.sample_ids
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in TENSORS)
    assert len(threads) == len(TENSORS) * len(pinned)  # every tensor of every batch, once
