"""The recorder inside transformers' Trainer, on an ordinary Llama: what it writes, and that the
training is the same.
"""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import npt
import npt.diagnostics
from npt.diagnostics import RecorderCallback
from npt.recorder.record import Record
from npt.recorder.recorder import Recorder

pytestmark = pytest.mark.usefixtures("drawn")
GUIDE = Path(npt.__file__).parent.parent / "docs" / "guides" / "watching-tensors.md"


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=32, **shape))


@pytest.fixture
def data() -> list[dict[str, list[int]]]:
    ids = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 8, "labels": row} for row in ids]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    settings |= {"gradient_accumulation_steps": 2, "report_to": [], "use_cpu": True}
    settings |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(str(folder / "out"), **settings | more)


def hooks(model: nn.Module) -> int:
    modules = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )
    return modules + sum(len(p._backward_hooks or ()) for p in model.parameters())


def trained(
    model: LlamaForCausalLM, data: Any, folder: Path, callbacks: list[Any], **more: Any
) -> list[Tensor]:
    Trainer(model, arguments(folder, **more), train_dataset=data, callbacks=callbacks).train()
    return [p.detach().clone() for p in model.parameters()]


def record(path: Path) -> Record:
    return Record.from_dict(json.loads(path.read_text()))


def test_chosen_steps_are_written_and_drawn_and_said(model, data, tmp_path, drawn) -> None:
    """And the training is bit-equal to one without it."""
    said: list[str] = []
    plain = trained(copy.deepcopy(model), data, tmp_path, [])
    folder = tmp_path / "trace"
    callback = RecorderCallback(folder, steps="1,3-4", say=said.append)
    recorded = trained(model, data, tmp_path, [callback])
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    assert sorted(p.name for p in folder.iterdir()) == [
        f"step-0000000{step}.json" for step in (1, 3, 4)
    ]
    found = record(folder / "step-00000003.json")
    assert (found.step, found.micro_batch) == (3, 0)
    names = {(row.direction, row.name) for row in found.rows}
    assert ("forward", "model.layers.1.self_attn.q_proj out") in names
    assert ("gradient", "model.layers.1.mlp.down_proj weight") in names
    # one micro-batch, one call of each module
    assert not any("#" in row.stage for row in found.rows)
    assert all(row.finite for row in found.rows)
    assert drawn == [([1, 3, 4], folder)]
    assert said[0].startswith("recording the first micro-batch of steps 1,3-4 on ")
    steps = [line for line in said[1:-1] if not line.startswith("  ")]
    assert [line.split(":")[0] for line in steps] == [
        f"recorded step {step} (micro-batch 0, process 0) in {folder / f'step-0000000{step}.json'}"
        for step in (1, 3, 4)
    ]
    assert len(said) == 2 + 3 * (1 + 10)  # each with its ten worst tensors
    assert all(": float32 [" in line for line in said[1:-1] if line.startswith("  "))
    assert said[-1] == f"pictures of the recorded steps: {folder / 'health.png'}"
    assert hooks(model) == 0


def test_the_page_is_told_what_a_guard_has_refused(tmp_path) -> None:
    callback = RecorderCallback(tmp_path, steps="1")
    for logs in ({"loss": 1.0}, {"refused": 2}, {"eval_loss": 1.0}):
        callback.on_log(None, None, None, logs=logs)
    assert callback.recording.refused == 2


@pytest.mark.parametrize("accumulation", [1, 3])
def test_only_the_first_micro_batch_of_a_step_is_watched(
    model, data, tmp_path, accumulation
) -> None:
    watched: list[int] = []
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        if hooks(model) > 1:
            watched.append(calls)
        calls += 1

    model.model.register_forward_pre_hook(count)
    callback = RecorderCallback(tmp_path / "trace", steps="2", say=lambda _: None)
    settings = {"max_steps": 2, "gradient_accumulation_steps": accumulation}
    trained(model, data, tmp_path, [callback], **settings)
    assert watched == [accumulation]


def test_other_processes_than_the_first_record_nothing(model, tmp_path) -> None:
    class State:
        is_world_process_zero, global_step = False, 0

    said: list[str] = []
    callback = RecorderCallback(tmp_path / "trace", steps="/1", say=said.append)
    callback.on_train_begin(None, State(), None)
    callback.on_step_begin(None, State(), None, model=model)
    assert hooks(model) == 0
    callback.on_step_end(None, State(), None)
    callback.on_train_end(None, State(), None)
    assert said == [] and not (tmp_path / "trace").exists()


def test_hooks_of_a_training_that_broke_off_go_with_the_next_one(model, data, tmp_path) -> None:
    callback = RecorderCallback(tmp_path / "trace", steps="1", say=lambda _: None)
    handle = model.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained(model, data, tmp_path, [callback])
    handle.remove()
    trained(model, data, tmp_path, [callback], max_steps=1)
    assert hooks(model) == 0


@pytest.mark.parametrize("failing", ["__enter__", "record"])
def test_a_failing_recorder_is_a_line_and_training_continues(
    model, data, tmp_path, monkeypatch, failing
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Recorder, failing, broken)
    plain, said = [p.detach().clone() for p in model.parameters()], []
    callback = RecorderCallback(tmp_path / "trace", steps="2", say=said.append)
    after = trained(model, data, tmp_path, [callback], max_steps=3)
    assert said[1:] == ["step 2 could not be recorded: OSError: no space left on device"]
    assert hooks(model) == 0 and not torch.equal(plain[0], after[0])


def printed(word: str) -> str:
    page = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    (code,) = [block for block in blocks if word in block]
    return code


def test_the_guides_lines_around_a_pass_do_what_they_say(
    model, data, monkeypatch, capsys, drawn
) -> None:
    # undone afterwards: the package keeps what was imported from it
    monkeypatch.setitem(
        vars(npt.diagnostics), "write_pictures", sys.modules["npt.recorder.picture"].write_pictures
    )
    batch = {name: torch.tensor([row[name] for row in data[:2]]) for name in data[0]}
    scope: dict[str, Any] = {"model": model, "batch": batch}
    exec(printed("with Recorder(model)"), scope)
    assert scope["exploded"] == [] and scope["steepest"][0].direction == "gradient"
    assert "tensors finite" in capsys.readouterr().out and hooks(model) == 0
    assert drawn == [([1], Path("health"))]


def test_the_guides_lines_record_a_training_as_printed(
    model, data, tmp_path, monkeypatch, capsys
) -> None:
    code = printed("RecorderCallback")
    monkeypatch.chdir(tmp_path)
    exec(code, {"model": model, "args": arguments(tmp_path, max_steps=2), "data": data})
    written = sorted(path.name for path in tmp_path.rglob("step-*.json"))
    assert len(written) >= 2
    assert "recorded step" in capsys.readouterr().out and hooks(model) == 0
