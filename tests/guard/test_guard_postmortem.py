"""A guarded run that gives up leaves all that is needed to look at it elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_loops import Micro, World, assert_equal, guarded_run, state_of
from guarded_trainers import InOrder, small_llama, trainer_of

import npt
from faults.row_faults import plant, row
from npt.cli.main import main
from npt.errors import BundleError, CheckpointError, TooManyRefusalsError
from npt.guard import Guard, postmortem, protect, read_postmortem, replay
from npt.guard.retrace import _nested, _weights


def stopped(folder: Path, windows: list[list[Micro]], **settings: Any) -> tuple[World, Path]:
    """Train until the guard gives up; return what is left, and the folder that the error names."""
    world = World()
    given = {"max_refused": 3, "postmortem": folder, **settings}
    with pytest.raises(TooManyRefusalsError, match=r"^3 refusals in a row") as caught:
        guarded_run(world, windows, **given)
    return world, Path(str(caught.value).partition("post-mortem: ")[2])


BAD = [Micro(9, fault="loss"), Micro(1)], *([Micro(i, fault="gradient")] for i in (2, 3, 4))
"""The first is followed by a good one, so that it is none of those in a row."""


def test_it_has_micro_batches_weights_moments_and_reasons(tmp_path) -> None:
    world, folder = stopped(tmp_path, [[Micro(7)], [Micro(8)], *BAD], trace=1)
    assert folder == tmp_path / "step-00000003"
    found = read_postmortem(folder)
    assert [m["1"] for m in found.micro_batches] == [False] * 4
    assert found.micro_batches[0]["0"].isnan().any()
    for seed, micro in zip((2, 3, 4), found.micro_batches[1:], strict=True):
        assert torch.equal(micro["0"], Micro(seed).data(torch.float32))
    after = state_of(world)
    for name, weight in after["model"].items():
        assert torch.equal(found.weights[name], weight)
    moments = after["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(found.moments["exp_avg of first.weight"], moments)
    said = found.said
    assert [(r["window"], r["kind"]) for r in said["refusals"]] == [
        (2, "loss"), (3, "gradient"), (4, "gradient"), (5, "gradient"),
    ]  # fmt: skip
    assert said["findings"][0]["verdict"]["cause"] == "corrupt input"
    assert said["versions"]["torch"] == torch.__version__ and said["step"] == 3
    assert said["settings"]["refuse"] == ["FloatingPointError"]
    # as before the refused windows: the run left nothing in it
    assert all(torch.equal(states["cpu"], world.random) for states in found.random[1:])


def test_suspects_are_those_since_the_last_good_window(tmp_path) -> None:
    first = [Micro(5, fault="loss")]
    _, folder = stopped(
        tmp_path, [first, [Micro(1)], *([Micro(i, fault="loss")] for i in (2, 3, 4))]
    )
    assert len(read_postmortem(folder).micro_batches) == 3


def test_the_state_is_that_of_before_the_window(tmp_path) -> None:
    bad = [Micro(i, fault="loss") for i in (2, 3, 4)]
    _, folder = stopped(tmp_path, [[Micro(1)], [*bad, Micro(5)]])
    world = World()
    guarded_run(world, [[Micro(1)]])
    found = read_postmortem(folder)
    assert torch.equal(found.weights["first.weight"], world.model.first.weight)
    assert found.said["step"] == 1 and folder.name == "step-00000001"


def test_a_folder_that_cannot_be_written_does_not_hide_why(tmp_path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(TooManyRefusalsError, match=r"could not be written: \w*Error: "):
        guarded_run(World(), BAD, max_refused=3, postmortem=tmp_path / "file")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(postmortem, "write_json", fail)
    with pytest.raises(TooManyRefusalsError, match="could not be written: OSError: full"):
        guarded_run(World(), BAD, max_refused=3, postmortem=tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []


def test_nested_inputs_and_other_values_are_stored_by_path(tmp_path) -> None:
    model = torch.nn.Linear(2, 1)
    given = {"max_refused": 1, "postmortem": tmp_path}
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    x = torch.ones(2, dtype=torch.bfloat16)
    inputs = {"a": [x, {"b": x[:1]}], "text": ["one"], "kind": torch.float32, "none": None}
    with guard.micro_batch(inputs=inputs) as micro:
        micro.loss = torch.tensor(float("nan"))
    with pytest.raises(TooManyRefusalsError):
        guard.step()
    (found,) = read_postmortem(tmp_path / "step-00000000").micro_batches
    assert torch.equal(found.pop("a.0"), x) and torch.equal(found.pop("a.1.b"), x[:1])
    assert found == {"text": ["one"], "kind": "torch.float32", "none": None}


def test_a_trainer_writes_it_into_its_output_folder(tmp_path) -> None:
    data = [row(0, "loss-nan")]
    trainer = protect(
        trainer_of(InOrder, data, tmp_path, plant(small_llama(), "loss-nan")), max_refused=2
    )
    with pytest.raises(TooManyRefusalsError, match=r"post-mortem: .*step-00000000$"):
        trainer.train()
    found = read_postmortem(tmp_path / "postmortem" / "step-00000000")
    assert torch.equal(found.micro_batches[0]["input_ids"], data[0]["input_ids"][None])
    assert len(found.micro_batches) == 2
    small_llama().load_state_dict(found.weights, strict=False)
    assert found.said["findings"][0]["verdict"]["operation"] == "mul"


@pytest.mark.parametrize(
    ("harm", "error", "said"),
    [
        (lambda f: (f / "postmortem.json").unlink(), BundleError, "holds no postmortem.json"),
        (lambda f: (f / "weights.safetensors").write_bytes(b"x"), CheckpointError, "sha256"),
        (lambda f: edit(f, version=2), BundleError, "npt replay"),
        (lambda f: edit(f, step="x"), BundleError, "step is 'x'"),
        (lambda f: edit(f, micro_batches=[1]), BundleError, "'refusal' is missing"),
    ],
)
def test_a_broken_one_is_refused_in_one_line(harm, error, said, tmp_path) -> None:
    _, folder = stopped(tmp_path, list(BAD))
    harm(folder)
    with pytest.raises(error, match=said) as caught:
        read_postmortem(folder)
    assert "\n" not in str(caught.value)


def edit(folder: Path, **entries: Any) -> None:
    path = folder / "postmortem.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}), encoding="utf-8")


def test_npt_replay_says_how_to_replay_it(tmp_path, capsys) -> None:
    world, folder = stopped(tmp_path, list(BAD))
    assert main(["replay", str(folder)]) == BundleError.exit_status
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    exec(said[said.index("print(") :], {"npt": npt, "model": world.model})
    assert "micro-batch 0 (samples 4): gradient" in capsys.readouterr().out


def test_a_replay_names_the_operation_and_changes_nothing(tmp_path) -> None:
    data = [row(0, "loss-nan"), row(1, "loss-nan")]
    model = plant(small_llama(), "loss-nan")
    trainer = protect(trainer_of(InOrder, data, tmp_path, model), max_refused=2)
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    other = plant(small_llama(), "loss-nan").train()
    with torch.no_grad():
        other.lm_head.weight.zero_()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    random = torch.get_rng_state()
    findings = replay(tmp_path / "postmortem" / "step-00000000", other)
    assert [f.verdict.operation for f in findings if f.verdict is not None] == ["mul", "mul"]
    assert [f.refusal.kind for f in findings] == ["loss", "loss"]
    assert_equal(dict(other.state_dict()), before, "weights")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in other.parameters())


def test_a_replay_of_a_loss_made_outside_is_told_how(tmp_path) -> None:
    world, folder = stopped(tmp_path, [[Micro(i, fault="loss")] for i in (2, 3, 4)])

    def loss(model: Any, inputs: Any) -> torch.Tensor:
        return model(*inputs).square().sum()

    found = replay(folder, world.model, loss)
    assert [f.verdict.cause for f in found if f.verdict is not None] == ["corrupt input"] * 3
    with pytest.raises(BundleError, match=r"has branch\.bias of shape \(3,\), the model has none"):
        replay(folder, torch.nn.Linear(2, 2))


def test_nested_inputs_are_put_together_again() -> None:
    found = {"a.0": torch.ones(1), "a.1.b": torch.zeros(1), "text": ["one"], "none": None}
    made = _nested(found, torch.device("cpu"))
    assert made == {"a": (found["a.0"], {"b": found["a.1.b"]}), "text": ["one"], "none": None}
    assert _nested({"1": 2, "0": 1}, torch.device("cpu")) == (1, 2)


def refused_once(folder: Path, model: Any, spoil: str, inputs: Any) -> Path:
    """A post-mortem of one refusal: of a loss made outside of the model, or of an update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=3e38 if spoil == "update" else 0.1)
    guard = Guard(model, optimizer, max_refused=1, postmortem=folder, max_grad_norm=1e6)
    with guard.micro_batch() as micro:
        out = model(inputs)
        micro.loss = out.square().sum() * (float("nan") if spoil == "loss" else 1.0)
        micro.loss.backward()
    with pytest.raises(TooManyRefusalsError):
        guard.step()
    guard.close()
    return next(folder.glob("step-*"))


def test_a_compiled_models_is_replayed_in_it_and_in_a_plain_one(tmp_path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    compiled = torch.compile(plain, backend="eager")
    folder = refused_once(tmp_path, compiled, "", torch.tensor([[1.0, float("nan")]]))
    assert set(read_postmortem(folder).weights) == set(dict(plain.named_parameters()))
    for model in (plain, compiled):
        (finding,) = replay(folder, model, loss=lambda model, x: model(*x).square().sum())
        assert finding.verdict is not None and finding.verdict.cause == "corrupt input"
    # one that was written by an earlier version
    found = {f"_orig_mod.{name}": w for name, w in read_postmortem(folder).weights.items()}
    with _weights(plain, {name: w + 1 for name, w in found.items()}, folder):
        assert torch.equal(plain[0].bias, found["_orig_mod.0.bias"] + 1)


def test_what_no_pass_made_is_not_put_down_to_the_hardware(tmp_path) -> None:
    for spoil, said in {
        "loss": "without a loss: it is made outside of the model; say how with",
        "update": "the optimizer's step made the number, not a pass; 0.weight",
    }.items():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        folder = refused_once(tmp_path / spoil, model, spoil, torch.ones(1, 2) * 1e3)
        (finding,) = replay(folder, model)
        assert finding.verdict is None and said in finding.why
        assert "hardware" not in finding.why
