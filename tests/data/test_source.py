from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import npt
from npt.data.source import open_source
from npt.errors import DataError
from npt.train.sources import check_sources, fitting_columns, sources_of


def records(path: Path, **settings) -> list:
    return list(open_source(npt.DataConfig(dataset_name=str(path), **settings)))


@pytest.fixture(params=[False, True], ids=["kept", "streaming"])
def streaming(request) -> bool:
    return request.param


class TestFiles:
    """Properties of files as a source; the files themselves are test_readers'."""

    @pytest.fixture
    def lines(self, tmp_path: Path) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "one"}\n{"text": "two", "id": "mine"}\n')
        return path

    def test_a_sequence_is_kept_and_a_stream_is_read_at_every_pass(self, lines):
        kept = open_source(npt.DataConfig(dataset_name=str(lines)))
        stream = open_source(npt.DataConfig(dataset_name=str(lines), streaming=True))
        assert isinstance(kept, Sequence) and not hasattr(stream, "__len__")
        assert list(stream) == list(stream) == list(kept)
        lines.write_text('{"text": "new"}\n')
        assert [r["text"] for r in stream] == ["new"]
        assert kept[0]["text"] != "new"

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("data.jsonl", "\n  \n"),
            ("data.csv", "text\n"),
            ("data.json", "[]"),
            ("bom.txt", "\ufeff"),
        ],
    )
    def test_files_without_a_record_are_refused(self, tmp_path, name, content):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=rf"{name} has no records; check --dataset_name"):
            records(tmp_path / name)

    @pytest.mark.parametrize(
        "name", ["missing.txt", "missing.jsonl", "missing.csv", "~/missing.csv", "no*such*file"]
    )
    def test_a_missing_file_is_refused_and_not_looked_for_on_the_hub(self, streaming, name):
        with pytest.raises(
            DataError, match=r"there is no file .*; check --dataset_name \('builtin'"
        ):
            records(Path(name), streaming=streaming)

    @pytest.mark.parametrize(
        ("settings", "flag"),
        [
            ({"dataset_split": "test"}, "--dataset_split test"),
            ({"dataset_config": "de"}, "--dataset_config de"),
        ],
    )
    def test_what_only_the_hub_has_is_refused(self, lines, streaming, settings, flag):
        with pytest.raises(DataError, match=f"{flag} has no effect on"):
            records(lines, streaming=streaming, **settings)


class TestReplay:
    def test_a_second_source_is_read_with_the_settings_of_the_first(self, tmp_path):
        config = npt.DataConfig(
            dataset_name="team/data",
            dataset_config="de",
            dataset_split="test",
            num_samples=9,
            replay_dataset="team/other",
        )
        first, replayed = sources_of(config)
        second = replayed.config
        assert (first.label, first.share) == ("data", 0.8)
        assert (replayed.label, replayed.share) == ("replay data", 0.2)
        assert (second.dataset_name, second.dataset_config) == ("team/other", None)
        assert (second.dataset_split, second.num_samples) == ("test", None)
        assert second.replay_dataset is None
        for local in ("builtin", str(tmp_path)):
            second = sources_of(replace(config, replay_dataset=local))[1].config
            assert second.dataset_split == "train"

    def test_it_is_checked_with_the_first(self, tmp_path):
        with pytest.raises(DataError, match=r"there is no file .*missing\.txt"):
            check_sources(npt.DataConfig(replay_dataset=str(tmp_path / "missing.txt")))

    def test_prompt_columns_are_dropped_where_the_second_source_has_none(self):
        config = npt.DataConfig(prompt_column="q", completion_column="a")
        assert fitting_columns(config, [{"q": "x", "a": "y"}]) == config
        assert fitting_columns(config, []) == config
        fitting = fitting_columns(config, [{"text": "x"}])
        assert (fitting.prompt_column, fitting.completion_column) == (None, None)

    def test_the_usual_text_column_is_taken_if_it_alone_is_there(self):
        config = npt.DataConfig(text_column="body")
        assert fitting_columns(config, [{"text": "x"}]).text_column == "text"
        for record in ({"body": "x", "text": "y"}, {"content": "x"}, "x"):
            assert fitting_columns(config, [record]) == config


class TestHub:
    @pytest.mark.parametrize("name", ["no-such-team/no-such-data", "no-such-data", "x" * 5000])
    def test_a_failure_is_one_line_with_name_split_and_remedy(self, streaming, name):
        with pytest.raises(
            DataError, match=r"cannot read the dataset '.*' \(split 'train'\): .*check the name and"
        ) as refusal:
            open_source(npt.DataConfig(dataset_name=name, streaming=streaming))
        assert name in str(refusal.value)
        assert "\n" not in str(refusal.value)

    def test_settings_are_passed_on(self, monkeypatch, streaming):
        import datasets

        asked = []
        monkeypatch.setattr(
            datasets,
            "load_dataset",
            lambda *args, **kwargs: asked.append((args, kwargs)) or "records",
        )
        config = npt.DataConfig(
            dataset_name="team/data",
            dataset_config="de",
            dataset_split="train[:1%]",
            streaming=streaming,
        )
        assert "".join(open_source(config)) == "records"
        options = {"name": "de", "split": "train[:1%]", "streaming": streaming}
        assert asked == [(("team/data",), options)]


class TestHubStream:
    """A local dataset replaces one of the hub: `load_dataset` gives the same class."""

    @pytest.fixture
    def opened(self, monkeypatch):
        import datasets

        def make(rows) -> object:
            made = datasets.IterableDataset.from_generator(rows)
            monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
            return open_source(npt.DataConfig(dataset_name="team/data", streaming=True))

        return make

    def test_is_read_anew_and_passes_over_what_was_read(self, opened):
        stream = opened(lambda: ({"text": str(i)} for i in range(5)))
        assert [r["text"] for r in stream] == [r["text"] for r in stream] == list("01234")
        assert [r["text"] for r in stream.skip(3)] == ["3", "4"]

    def test_a_network_that_fails_on_the_way_is_one_line(self, opened):
        def rows() -> Iterator[dict[str, str]]:
            yield {"text": "first"}
            raise ConnectionError("Connection reset by peer\nand a page of details")

        stream = opened(rows)
        for read in (stream, stream.skip(0)):
            records = iter(read)
            assert next(records) == {"text": "first"}
            with pytest.raises(DataError) as refusal:
                next(records)
            message = str(refusal.value)
            assert "cannot read the dataset 'team/data' (split 'train'): Connection res" in message
            assert "\n" not in message and "check the name and the network" in message
