"""Mixtures: sources by weight, in shares that hold, resumable from anywhere; replay is one of
them.
"""

from __future__ import annotations

import io
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import npt
from npt.cli.main import main
from npt.data import samples as samples_module
from npt.data.loader import Loader, Other, Position
from npt.errors import CheckpointError, ConfigError, DataError
from npt.train.sources import check_sources, evaluation_of, open_sources, samples_of, sources_of

SHARED = settings(
    deadline=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def written(folder: Path, name: str, count: int, **more: Any) -> Path:
    """Records of a source, one sample each, named by it; all differ, so that a twentieth is held
    out.
    """
    path = folder / f"{name}.jsonl"
    letters = "abcdefghij"
    texts = [
        f"{name}{letters[i % 10]}{letters[i // 10 % 10]}{letters[i // 100]}" for i in range(count)
    ]
    path.write_text(
        "".join(
            json.dumps({"id": f"{name}{i}", "text": text, **more}) + "\n"
            for i, text in enumerate(texts)
        )
    )
    return path


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    monkeypatch.chdir(tmp_path)
    for name, count in (("x", 60), ("y", 40), ("z", 25)):
        written(tmp_path, name, count)
    return "x.jsonl", "y.jsonl", "z.jsonl"


def loader(tokenizer: Any, config: npt.DataConfig, *, seed: int = 3, **options: Any) -> Loader:
    sources = open_sources(config)
    samples, *others = samples_of(sources, tokenizer, seed, [True] * len(sources))
    mixed = [
        Other(other, source.share, source.label)
        for other, source in zip(others, sources[1:], strict=True)
    ]
    return Loader(samples, options.pop("batch_size", 3), others=mixed, seed=seed, **options)


def names(found: Loader, start: Position = Position()) -> list[Any]:  # noqa: B008 - a constant
    return [
        (loaded.epoch, loaded.batch.sample_ids, loaded.position) for loaded in found.batches(start)
    ]


class TestSources:
    def test_weights_are_shares_whatever_they_sum_to(self) -> None:
        assert npt.DataConfig(dataset_mix="a:7, b:2,c:1").mix == (
            ("a", 0.7),
            ("b", 0.2),
            ("c", 0.1),
        )
        assert npt.DataConfig().mix == ()
        assert npt.DataConfig(dataset_mix="a:1e308,b:1e308").mix == (("a", 0.5), ("b", 0.5))

    def test_names_are_read_from_the_right(self) -> None:
        mix = r"C:\data\x.txt:1,team/set:de:2,hf://x:y:1"
        assert [name for name, _ in npt.DataConfig(dataset_mix=mix).mix] == [
            r"C:\data\x.txt",
            "team/set:de",
            "hf://x:y",
        ]

    def test_a_source_is_read_by_what_it_is(self, tmp_path: Path) -> None:
        path = written(tmp_path, "x", 3)
        mix = f"{path}:1,builtin:1,slimpajama:1,fineweb-edu:1,team/set:de:1,team/set:1"
        parts = sources_of(
            npt.DataConfig(dataset_mix=mix, dataset_split="test", num_samples=5, max_length=9)
        )
        found = [
            (
                p.config.dataset_name,
                p.config.dataset_config,
                p.config.dataset_split,
                p.config.streaming,
            )
            for p in parts
        ]
        assert found == [
            (str(path), None, "train", False),
            ("builtin", None, "train", False),
            ("cerebras/SlimPajama-627B", None, "test", True),
            ("HuggingFaceFW/fineweb-edu", "sample-10BT", "test", True),
            ("team/set", "de", "test", False),
            ("team/set", None, "test", False),
        ]
        assert [part.config.num_samples for part in parts] == [5, None, None, None, None, None]
        assert {part.config.max_length for part in parts} == {9} and {
            part.config.dataset_mix for part in parts
        } == {None}
        assert sources_of(npt.DataConfig(dataset_mix=f"{path}:1,builtin:1", streaming=True))[
            0
        ].config.streaming

    @pytest.mark.parametrize(
        ("mix", "more", "told"),
        [
            ("x.jsonl:1,none.jsonl:1", {}, r"there is no file none\.jsonl"),
            (
                "x.jsonl:1,builtin:1",
                {"dataset_split": "test"},
                r"--dataset_split test is for hub data sets, and there is none in --dat",
            ),
        ],
    )
    def test_all_of_them_are_checked_before_anything_is_read(self, three, mix, more, told) -> None:
        with pytest.raises(DataError, match=told):
            check_sources(npt.DataConfig(dataset_mix=mix, **more))

    def test_each_has_the_columns_that_it_has(self, tmp_path: Path) -> None:
        plain, asked = written(tmp_path, "x", 3), tmp_path / "q.jsonl"
        asked.write_text('{"q": "a", "a": "b"}\n')
        for mix in (f"{plain}:1,{asked}:1", f"{asked}:1,{plain}:1"):
            found = open_sources(
                npt.DataConfig(dataset_mix=mix, prompt_column="q", completion_column="a")
            )
            assert {source.label: source.config.prompt_column for source in found} == {
                str(plain): None,
                str(asked): "q",
            }
        both = open_sources(
            npt.DataConfig(
                dataset_mix=f"{plain}:1,builtin:1", prompt_column="p", completion_column="c"
            )
        )
        # a name that nothing has is a mistake, and is refused
        assert [source.config.prompt_column for source in both] == ["p", "p"]

    def test_other_commands_take_no_mixture(self) -> None:
        from npt.data.source import open_source

        with pytest.raises(
            ConfigError, match="--dataset_mix a:1,b:1 is for training; name one data set"
        ):
            open_source(npt.DataConfig(dataset_mix="a:1,b:1"))


class TestOrder:
    @SHARED
    @given(
        weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=3),
        streaming=st.booleans(),
        packing=st.booleans(),
        epochs=st.integers(1, 2),
        where=st.floats(0, 1),
    )
    def test_from_any_position_on_the_rest_is_the_same(
        self, tokenizer, three, weights, streaming, packing, epochs, where
    ) -> None:
        samples_module.SHUFFLE_BLOCK, before = 8, samples_module.SHUFFLE_BLOCK
        try:
            mix = ",".join(f"{name}:{weight}" for name, weight in zip(three, weights, strict=False))
            config = npt.DataConfig(
                dataset_mix=mix, max_length=10, streaming=streaming, packing=packing
            )
            whole = names(loader(tokenizer, config, epochs=epochs))
            taken = round(where * len(whole))
            position = Position() if taken == 0 else whole[taken - 1][2]
            saved = Position.from_dict(json.loads(json.dumps(position.as_dict())))
            assert saved == position
            assert names(loader(tokenizer, config, epochs=epochs), saved) == whole[taken:]
            counted = loader(tokenizer, config, epochs=epochs).count()
            assert counted == (None if streaming else len(whole))
        finally:
            samples_module.SHUFFLE_BLOCK = before

    def test_two_sources_are_what_replay_makes_of_them(self, tokenizer, three) -> None:
        x, y, _ = three
        mixed = npt.DataConfig(dataset_mix=f"{x}:0.7,{y}:0.3", max_length=10)
        replayed = npt.DataConfig(dataset_name=x, replay_dataset=y, replay_ratio=0.3, max_length=10)
        assert names(loader(tokenizer, mixed, epochs=2)) == names(
            loader(tokenizer, replayed, epochs=2)
        )

    def test_an_epoch_is_the_first_sources_and_the_others_begin_again(
        self, tokenizer, three
    ) -> None:
        config = npt.DataConfig(dataset_mix="x.jsonl:1,z.jsonl:4", max_length=10)
        batches = names(loader(tokenizer, config, epochs=2))
        for epoch in range(2):
            drawn = Counter(
                name for number, batch, _ in batches if number == epoch for name in batch
            )
            first = {name: count for name, count in drawn.items() if name.startswith("x")}
            assert set(first.values()) == {1} and len(first) > 50  # all but what is held out
        assert batches[-1][2].other(0)[0] >= 2 * 4 * 50 // 25 - 4

    def test_shares_are_those_asked_for(self, tokenizer, three) -> None:
        config = npt.DataConfig(dataset_mix="x.jsonl:2,y.jsonl:1,z.jsonl:1", max_length=10)
        drawn = Counter(
            name[0] for _, batch, _ in names(loader(tokenizer, config, epochs=20)) for name in batch
        )
        total = drawn.total()
        for name, share in (("x", 0.5), ("y", 0.25), ("z", 0.25)):
            assert abs(drawn[name] / total - share) < 4 * math.sqrt(share * (1 - share) / total)

    def test_another_seed_draws_another_order(self, tokenizer, three) -> None:
        config = npt.DataConfig(dataset_mix="x.jsonl:1,y.jsonl:1", max_length=10)
        one, again, other = (names(loader(tokenizer, config, seed=seed)) for seed in (3, 3, 4))
        assert one == again != other

    def test_a_position_with_one_other_source_is_written_as_before(self) -> None:
        keys = {"epoch", "place", "replay_epoch", "replay_place", "drawn"}
        assert Position().after_other(0, 2, Position().place).as_dict().keys() == keys
        third = Position().after_other(1, 4, Position().place)
        assert third.as_dict()["further"] == [[4, [0, 0, 0]]] and third.other(0) == (
            0,
            Position().place,
        )
        assert third.after_other(2, 1, Position().place).other(1)[0] == 4


def test_every_source_is_evaluated_by_its_share_on_held_out_samples(tokenizer, tmp_path) -> None:
    paths = [written(tmp_path, name, 400) for name in "xy"] + [tmp_path / "few.jsonl"]
    paths[2].write_text('{"id": "few", "text": "abc"}\n')
    config = npt.DataConfig(dataset_mix=f"{paths[0]}:6,{paths[1]}:3,{paths[2]}:1", max_length=10)
    samples, labels, held = evaluation_of(open_sources(config), tokenizer, 10, 128)
    assert Counter(labels) == {str(paths[0]): 6, str(paths[1]): 3, str(paths[2]): 1} and held == [
        True,
        True,
        False,
    ]
    assert all(sample.heldout for sample in samples[:9]) and samples[9].id.startswith("few")


@pytest.fixture
def make(load_model, tokenizer, tmp_path):
    def make(
        mix: str,
        name: str = "run",
        max_steps: int | None = None,
        data: Any = None,
        resume: str | None = None,
        **more: Any,
    ):
        model = load_model()
        npt.attach(model, npt.NPTConfig(rank=4, layers="upper_half"), seed=1)
        config = npt.TrainConfig(
            output_dir=str(tmp_path / name),
            learning_rate=1e-3,
            log_steps=10,
            eval_samples=8,
            batch_size=4,
            smoke_test=False,
            max_steps=max_steps,
            resume=resume,
            scheduler_type="constant",
            **more,
        )
        console = Console(file=io.StringIO(), width=300)
        data_config = npt.DataConfig(max_length=10, dataset_mix=mix)
        return npt.Trainer(model, tokenizer, data, config, data_config=data_config, console=console)

    return make


def test_a_run_says_and_records_its_mixture_and_is_resumed_exactly(make, three, tmp_path) -> None:
    mix = "z.jsonl:1,x.jsonl:1,y.jsonl:2"
    whole = make(mix, "whole")
    result = whole.train()
    said = whole.setup.console.file.getvalue()
    assert (
        "shares of the samples z.jsonl 0.25, x.jsonl 0.25, y.jsonl 0.5 (they sum to 1); an epoch"
        " ends with z.jsonl" in said
    )
    assert "y.jsonl: came to its end and was begun again" in said
    assert set(result.fidelity.sources) == {"z.jsonl", "x.jsonl", "y.jsonl"}
    assert (
        sum(figures.tokens for figures in result.fidelity.sources.values())
        == result.fidelity.student.tokens
    )
    written = json.loads((result.folder / "fidelity.json").read_text())["sources"]
    assert (
        written["x.jsonl"]["perplexity_ratio"]
        == result.fidelity.sources["x.jsonl"].perplexity_ratio
    )
    record = json.loads((result.folder / "run.json").read_text())
    assert record["settings"]["dataset_mix"] == mix
    assert record["sources"][2] == {"name": "y.jsonl", "share": 0.5}
    events = [
        json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()
    ]
    data = {event["source"]: event for event in events if event["event"] == "data"}
    assert (
        data["y.jsonl"]["share"] == 0.5
        and data["y.jsonl"]["begun_again"] >= 1
        and data["z.jsonl"]["samples"] > 0
    )

    assert make(mix, "cut", max_steps=3).train().steps == 3
    make(mix, "cut", resume="auto").train()
    last = (max((tmp_path / name / "checkpoints").iterdir()) for name in ("whole", "cut"))
    one, other = (
        (folder / "adapter" / "adapter_model.safetensors").read_bytes() for folder in last
    )
    assert one == other
    with pytest.raises(
        CheckpointError, match=r"--dataset_mix z\.jsonl:1.* this run asks for z\.jsonl:2,x"
    ):
        make("z.jsonl:2,x.jsonl:1,y.jsonl:2", "cut", resume="auto")
    Path("y.jsonl").write_text('{"text": "other"}\n{"text": "words"}\n')
    with pytest.raises(
        CheckpointError, match=r"the checkpoint was trained on y\.jsonl of 40 records"
    ):
        make(mix, "cut", resume="auto")


def test_a_calibrated_start_uses_all_sources_and_training_the_rest(
    load_model, tokenizer, three, tmp_path
) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=4, layers="upper_half", init="calibrated"), seed=1)
    config = npt.TrainConfig(
        output_dir=str(tmp_path / "run"),
        eval_samples=4,
        batch_size=2,
        max_steps=4,
        calibration_tokens=80,
    )
    data_config = npt.DataConfig(max_length=10, dataset_mix="x.jsonl:1,y.jsonl:1,z.jsonl:1")
    trainer = npt.Trainer(
        model, tokenizer, None, config, data_config=data_config, console=Console(file=io.StringIO())
    )
    solved = [sample.id for sample in trainer.data.start_samples]
    assert {name[0] for name in solved} == set("xyz")
    assert trainer.data.start.begun == sum(name.startswith("x") for name in solved)
    seen = [
        name
        for window in itertools.islice(trainer.data.windows(), 5)
        for batch in window.batches
        for name in batch.sample_ids
    ]
    assert len(set(seen[:10])) == 10 and not set(seen[:10]) & set(solved)


def test_records_beside_a_mixture_are_refused(make, three) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--dataset_mix is 'x\.jsonl:1,y.jsonl:1', but records were given as well; drop one",
    ):
        make("x.jsonl:1,y.jsonl:1", data=[{"text": "abc"}])


def test_a_source_that_nothing_comes_of_is_named(make, three) -> None:
    Path("y.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"y\.jsonl: no sample to train on came of 1 records"):
        make("x.jsonl:1,y.jsonl:1")


def test_the_doctor_looks_at_every_source(three, capsys) -> None:
    assert main(["doctor", "--data", "--dataset_mix", "x.jsonl:3,y.jsonl:1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: report["records"] for name, report in found.items()} == {
        "x.jsonl": 60,
        "y.jsonl": 40,
    }
    assert found["y.jsonl"]["name"] == "y.jsonl (25.0% of the samples)"
    assert main(["doctor", "--data", "x.jsonl", "--dataset_mix", "x.jsonl:3,y.jsonl:1"]) == 2
    assert "--dataset_name is x.jsonl and --dataset_mix" in capsys.readouterr().err


def test_the_doctor_reads_replayed_data_by_the_columns_they_have(three, tmp_path, capsys) -> None:
    asked = tmp_path / "q.jsonl"
    asked.write_text("".join(json.dumps({"q": f"ab{i}", "a": "cd"}) + "\n" for i in range(9)))
    flags = [
        "--prompt_column",
        "q",
        "--completion_column",
        "a",
        "--replay_dataset",
        "x.jsonl",
        "--json",
    ]
    assert main(["doctor", "--data", str(asked), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["replay"]["records"] == 60


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--dataset_mix", "x.jsonl:1,y.jsonl:0"],
            "--dataset_mix gives 'y.jsonl' the weight 0; weights are finite",
        ),
        (["--dataset_mix", "x.jsonl:1,none.txt:1"], "there is no file none.txt"),
        (
            ["--dataset_mix", "x.jsonl:1,y.jsonl:1", "--dataset_name", "builtin"],
            "--dataset_name is builtin and --dataset_mix",
        ),
    ],
)
def test_the_command_line_refuses_in_one_line(three, capsys, arguments, told) -> None:
    assert main(["pretrain", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
