"""A guarded run that gives up leaves all that is needed to look at it elsewhere."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_loops import Micro, World, assert_equal, guarded_run, state_of
from guarded_trainers import InOrder, small_llama, trainer_of

import npt
from faults.row_faults import plant, row
from npt.cli.main import main
from npt.errors import BundleError, CheckpointError, ConfigError, TooManyRefusalsError
from npt.forensics import bundle
from npt.guard import Guard, protect, read_postmortem, replay
from npt.manifest import write_manifest


def stopped(folder: Path, windows: list[list[Micro]], **settings: Any) -> tuple[World, Path]:
    """Train until the guard gives up; return what is left, and the folder that the error names."""
    world = World()
    given = {"max_refused": 3, "postmortem": folder, **settings}
    with pytest.raises(TooManyRefusalsError, match=r"^3 refusals in a row") as caught:
        guarded_run(world, windows, **given)
    call = re.search(
        r"; to find the cause, call npt\.guard\.replay\('(.*)', model\)$", str(caught.value)
    )
    assert call is not None, caught.value
    return world, Path(call[1])


BAD = [Micro(9, fault="loss"), Micro(1)], *([Micro(i, fault="gradient")] for i in (2, 3, 4))
"""The first is followed by a good one, whose step it does not know: it is none of the suspects."""


def test_it_has_micro_batches_weights_moments_and_reasons(tmp_path) -> None:
    world, folder = stopped(tmp_path, [[Micro(7)], [Micro(8)], *BAD], trace=1)
    assert folder == tmp_path / "step-00000003"
    found = read_postmortem(folder)
    assert [m.inputs[1] for m in found.micro_batches] == [False] * 3
    assert [m.sample_ids for m in found.accepted] == [("7",), ("8",), ("1",)]
    for seed, micro in zip((2, 3, 4), found.micro_batches, strict=True):
        assert torch.equal(micro.inputs[0], Micro(seed).data(torch.float32))
    after = state_of(world)
    for name, weight in after["model"].items():
        assert torch.equal(found.weights[name], weight)
    moments = after["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(found.moments["exp_avg of first.weight"], moments)
    said = found.record
    assert [(r["window"], r["kind"]) for r in said["refusals"]] == [
        (2, "loss"), (3, "gradient"), (4, "gradient"), (5, "gradient"),
    ]  # fmt: skip
    assert said["findings"][0]["verdict"]["cause"] == "corrupt input"
    assert said["versions"]["torch"] == version("torch") and said["step"] == 3
    assert said["settings"]["refuse"] == ["FloatingPointError"]
    # as before the refused windows: the run left nothing in it
    assert all(
        torch.equal(states["cpu"], world.random)
        for states in [m.random for m in found.micro_batches]
    )


def test_suspects_are_those_since_the_last_step(tmp_path) -> None:
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
    assert found.record["step"] == 1 and folder.name == "step-00000001"


def test_a_folder_that_cannot_be_written_does_not_hide_why(tmp_path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(TooManyRefusalsError, match=r"could not be written: \w*Error: "):
        guarded_run(World(), BAD, max_refused=3, postmortem=tmp_path / "file")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(bundle, "write_json", fail)
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
    (stored,) = read_postmortem(tmp_path / "step-00000000").micro_batches
    first, deeper = stored.inputs.pop("a")
    assert torch.equal(first, x) and torch.equal(deeper["b"], x[:1])
    assert stored.inputs == {"text": ["one"], "kind": "torch.float32", "none": None}


def test_a_trainer_writes_it_into_its_output_folder(tmp_path) -> None:
    data = [row(0, "loss-nan")]
    trainer = protect(
        trainer_of(InOrder, data, tmp_path, plant(small_llama(), "loss-nan")), max_refused=2
    )
    with pytest.raises(
        TooManyRefusalsError, match=r"call npt.guard.replay\('.*step-00000000', model\)$"
    ):
        trainer.train()
    found = read_postmortem(tmp_path / "postmortem" / "step-00000000")
    assert torch.equal(found.micro_batches[0].inputs["input_ids"], data[0]["input_ids"][None])
    assert len(found.micro_batches) == 2
    small_llama().load_state_dict(found.weights, strict=False)
    assert found.record["findings"][0]["verdict"]["operation"] == "mul"


@pytest.mark.parametrize(
    ("harm", "error", "said"),
    [
        (lambda f: (f / "postmortem.json").unlink(), BundleError, "has no postmortem.json"),
        (lambda f: (f / "weights.safetensors").write_bytes(b"x"), CheckpointError, "sha256"),
        (lambda f: edit(f, version=3), BundleError, "format version 3, but this npt"),
        (lambda f: edit(f, step="x"), BundleError, "step is 'x'"),
        (
            lambda f: edit(f, micro_batches=[1]),
            BundleError,
            "is damaged: TypeError: .*; restore it",
        ),
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
    write_manifest(folder)


def test_npt_replay_says_how_to_replay_it(tmp_path, capsys) -> None:
    world, folder = stopped(tmp_path, list(BAD))
    assert main(["replay", str(folder)]) == BundleError.exit_status
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    code = said[said.index("print(") :]
    with pytest.raises(ConfigError, match="the model returns no loss: pass one with"):
        exec(code, {"npt": npt, "model": world.model})
    code = code.replace(", model)", ", model, lambda model, inputs: model(*inputs).sum())")
    exec(code, {"npt": npt, "model": world.model})
    assert "replayed: no refusal" in capsys.readouterr().out


def test_a_replay_names_the_operation_and_changes_nothing(tmp_path) -> None:
    data = [row(0), row(1, "loss-nan"), row(2, "loss-nan")]
    model = plant(small_llama(), "loss-nan")
    trainer = protect(trainer_of(InOrder, data, tmp_path, model), max_refused=2)
    with pytest.raises(TooManyRefusalsError):
        trainer.train()
    other = plant(small_llama(), "loss-nan").train()
    with torch.no_grad():
        other.lm_head.weight.zero_()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    random = torch.get_rng_state()
    found = replay(tmp_path / "postmortem" / "step-00000001", other)
    operations = [f.verdict.operation for f in found.traces.values() if f.verdict is not None]
    assert operations == ["mul", "mul"] and found.reproduced
    assert found.classification == "data" and found.trials == (False,)
    assert_equal(dict(other.state_dict()), before, "weights")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in other.parameters())


def test_a_replay_of_a_loss_made_outside_is_told_how(tmp_path) -> None:
    world, folder = stopped(tmp_path, [[Micro(i, fault="loss")] for i in (2, 3, 4)])

    def loss(model: Any, inputs: Any) -> torch.Tensor:
        return model(*inputs).square().sum()

    found = replay(folder, world.model, loss)
    causes = [f.verdict.cause for f in found.traces.values() if f.verdict is not None]
    assert causes == ["corrupt input"] * 3 and found.classification == "data"
    with pytest.raises(
        BundleError, match=r"has branch\.bias of shape \(3,\), but the model has none"
    ):
        replay(folder, torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (small_llama(), "You must specify exactly one of input_ids"),
        (torch.nn.Linear(2, 1), r".*unexpected keyword argument 'prompt_ids'"),
    ],
)
def test_inputs_that_the_model_does_not_take_need_a_loss(model, said, tmp_path) -> None:
    """As TRL's GRPO, whose trainer makes the model's inputs of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, max_refused=1, postmortem=tmp_path)
    with guard.micro_batch(inputs={"prompt_ids": torch.ones(1, 2)}) as micro:
        micro.loss = torch.tensor(float("nan"))
    with pytest.raises(TooManyRefusalsError):
        guard.step()
    with pytest.raises(ConfigError) as caught:
        replay(next(tmp_path.iterdir()), model)
    told = str(caught.value)
    start = "the model does not compute a loss from the inputs of its trainer (prompt_ids): "
    assert told.startswith(start) and "\n" not in told
    assert re.match(said, told.removeprefix(start)), told
    assert told.endswith(", or loss=trainer.compute_loss for a Trainer")


def refused_once(folder: Path, model: Any, spoil: str, inputs: Any) -> Path:
    """A post-mortem of one refusal: of a loss that was spoilt in the loop, or of an update."""
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
        found = replay(folder, model, loss=lambda model, x: model(*x).square().sum())
        assert found.verdict is not None and found.verdict.cause == "corrupt input"


def test_a_fault_of_the_loop_is_transient_and_an_update_is_not_traced(tmp_path) -> None:
    for spoil, classification in (("loss", "transient"), ("update", "undecided")):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        folder = refused_once(tmp_path / spoil, model, spoil, torch.ones(1, 2) * 1e3)
        found = replay(folder, model, lambda model, x: model(*x).square().sum())
        assert found.classification == classification
    assert not found.traces


def squared(model: Any, inputs: Any) -> torch.Tensor:
    return model(*inputs).square().mean()


@pytest.mark.parametrize(
    ("fault", "expected", "kind"),
    [("data", "data", "loss"), ("state", "state", "loss"), ("rate", "state", "update")],
)
def test_any_loops_post_mortem_says_whether_data_or_state_is_to_blame(
    tmp_path, fault, expected, kind
) -> None:
    """Accepted micro-batches are tried in the state of the refused one, with its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if fault == "rate":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    guard = Guard(model, optimizer, loss="mean", max_refused=1, postmortem=tmp_path)
    for step in range(4):
        x = torch.randn(3, 4)
        if step == 3:
            if fault == "data":
                x[0, 0] = 1e30  # finite, its square is not
            elif fault == "state":
                with torch.no_grad():
                    model.weight[0, 1] = 1e30
            else:
                optimizer.param_groups[0]["lr"] = 3e38
        with guard.micro_batch(3, [f"s{step}"], inputs=(x,)) as micro:
            micro.loss = loss = squared(model, (x,))
            loss.backward()
        if step < 3:
            guard.step()
    with pytest.raises(TooManyRefusalsError):
        guard.step()
    guard.close()
    (folder,) = tmp_path.iterdir()
    other = torch.nn.Linear(4, 1)
    before = {name: p.detach().clone() for name, p in other.named_parameters()}
    found = replay(folder, other, squared)
    assert found.classification == expected and found.reproduced
    assert [refusal.kind for refusal in found.refusals] == [kind]
    assert found.trials == (expected == "state",) * (1 if kind == "update" else 3)
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())


def test_an_input_may_be_overwritten_after_its_step(tmp_path) -> None:
    model, x = torch.nn.Linear(2, 1), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, max_refused=1, postmortem=tmp_path)
    for value in (1.0, float("nan")):
        x.fill_(value)
        with guard.micro_batch() as micro:
            micro.loss = loss = model(x).sum()
            loss.backward()
        if value == 1.0:
            guard.step()
    with pytest.raises(TooManyRefusalsError):
        guard.step()
    (accepted,) = read_postmortem(next(tmp_path.iterdir())).accepted
    assert torch.equal(accepted.inputs[0], torch.ones(1, 2))
