"""The checks of verify_fixes.py pass on a sound package, and each mistake, made again, fails the
check that is about it.
"""

import copy
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import npt
from faults import bench
from fixes import CHECKS, training
from fixes.check import Check, Subject, verify
from npt.adapters import layer as adapted
from npt.adapters import stream
from npt.adapters.converted import is_attached
from npt.adapters.layer import MULTIPLIERS, NPTAdapter
from npt.config import NPTConfig, TrainConfig
from npt.data.encoding import Encoder
from npt.data.samples import Loader
from npt.distill import local, strategies
from npt.distill.hidden_losses import HIDDEN_LOSSES
from npt.guard.window import Gradients, GradientWindow
from npt.recorder.recorder import Recorder
from npt.tools.collect import collect as collecting
from npt.train.metrics import StepMetrics

SCRIPT = Path(npt.__file__).parent.parent / "debug" / "verify_fixes.py"


@pytest.fixture
def subject(load_model, tokenizer, monkeypatch) -> Subject:
    def decode(ids: list[int], **_: Any) -> str:
        return "".join(chr(i - 3) for i in ids if i >= 3)

    monkeypatch.setattr(type(tokenizer), "decode", staticmethod(decode), raising=False)
    return Subject(load_model(), NPTConfig(rank=4, layers="1,3"), TrainConfig(), tokenizer)


def check(subject: Subject, name: str) -> Check:
    (found,) = verify(subject, [name])
    return found


# --- the mistakes, made again

Sabotage = Callable[[pytest.MonkeyPatch, Subject], Any]


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Sabotage:
    """Replace a function by one that gets the honest one first."""

    def sabotage(patch: pytest.MonkeyPatch, _: Subject) -> None:
        honest = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **named: change(honest, *args, **named))

    return sabotage


def multiplier(form: Callable[[torch.Tensor], torch.Tensor]) -> Sabotage:
    return lambda patch, _: patch.setitem(MULTIPLIERS, "sigmoid", lambda u, bound: form(u))


def after_init(change: Callable[[NPTAdapter], Any]) -> Sabotage:
    @torch.no_grad()
    def careless(honest: Any, self: NPTAdapter, *args: Any, **named: Any) -> None:
        honest(self, *args, **named)
        change(self)

    return wrapped(NPTAdapter, "__init__", careless)


def fp16(_: pytest.MonkeyPatch, subject: Subject) -> None:
    subject.model.model.layers[2].mlp.up_proj.compute_dtype = torch.float16


def second_copy(honest: Any, model: Any, config: Any) -> None:
    honest(model, config)
    model.teacher_embedding = copy.deepcopy(model.model.embed_tokens)


def unnormalised(patch: pytest.MonkeyPatch, _: Subject) -> None:
    careless = lambda o, t, h: (o - t).square().sum(dim=-1)  # noqa: E731
    patch.setitem(HIDDEN_LOSSES, "nmse", careless)


def unclipped(honest: Any, self: Any, *args: Any, **named: Any) -> None:
    honest(self, *args, **named)
    self.max_grad_norm = math.inf


def causal_only(honest: Any, **named: Any) -> Any:
    mask = honest(**named)
    return mask if mask is None else torch.ones_like(mask).tril()


def counting(patch: pytest.MonkeyPatch, subject: Subject) -> None:
    """Count every position, padding too, and by the loss's mean."""
    for module in (local, strategies):
        honest = module.batch_sums
        patch.setattr(
            module,
            "batch_sums",
            lambda config, batch, *more, honest=honest: honest(config, batch, *more)._replace(
                tokens=batch.input_ids.numel()
            ),
        )


def unmasked(honest: Any, *args: Any) -> Any:
    return replace(honest(*args), labels=None)


def cut_at_the_end(
    honest: Any, self: Any, name: str, prompt: Any, completion: Any, *more: Any
) -> Any:
    kept = prompt[: self._config.max_length - 1]
    return honest(self, name, kept, completion[: self._config.max_length - len(kept)], *more)


def trained_prompt(honest: Any, *args: Any) -> Any:
    record = honest(*args)
    return record | {"labels": record["input_ids"]}


def ungated(honest: Any, self: Any, flag: torch.Tensor) -> None:
    honest(self, torch.ones_like(flag))


def logged_with_refused(honest: Any, self: Any, outcome: Any, *args: Any) -> Any:
    line = honest(self, outcome, *args)
    return line | {"loss": line["loss"] * len(outcome.reports) / outcome.micro_batches}


def blind(*_: Any, **__: Any) -> None:
    return None


MISTAKES: dict[str, Sabotage] = {
    "bounded": multiplier(lambda u: 1 + torch.tanh(u)),
    "neutral": multiplier(lambda u: 0.5 * torch.sigmoid(u) + 0.5),
    "small_start": after_init(lambda made: made.A.mul_(1.5)),
    "scaled_additive": wrapped(
        adapted,
        "modulate",
        lambda honest, *args: honest(*args[:-1], replace(args[-1], additive_scale=1.0)),
    ),
    "normalised": unnormalised,
    "clipped": wrapped(GradientWindow, "__init__", unclipped),
    "in_fp32": fp16,
    "shared": wrapped(bench, "attach", second_copy),
    "keyed": wrapped(stream, "create_causal_mask", causal_only),
    "padding_zeroed": wrapped(stream.Stream, "clean", lambda honest, self, states: states),
    "padding_uncounted": counting,
    "prompts_masked": wrapped(Encoder, "_fitted", unmasked),
    "targets_kept": wrapped(Encoder, "_fitted", cut_at_the_end),
    "all_masked": wrapped(bench, "find_fault", blind),
    "replayed": wrapped(Loader, "_is_replayed", lambda honest, self, drawn: drawn % 2 == 0),
    "failures_trained": wrapped(collecting, "_record", trained_prompt),
    "refused": wrapped(Gradients, "add", ungated),
    "averaged": wrapped(StepMetrics, "line", logged_with_refused),
    "accumulated": counting,
    "safe_mode": lambda patch, _: patch.setattr(NPTConfig, "multiplicative", True),
    "watched": wrapped(training, "tensor_fault", blind),
    "smoke_tested": wrapped(training, "smoke_test", lambda honest, *args: "smoke test passed"),
    "recorded": wrapped(Recorder, "_observer", blind),
    "explosion_named": wrapped(training, "trace", blind),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_mistake_made_again_fails_its_check(monkeypatch, subject, name) -> None:
    MISTAKES[name](monkeypatch, subject)
    found = check(subject, name)
    assert not found.passed and str(found).startswith(f"FAILED  {found.proved}  ("), found
    assert "cannot be checked" not in found.figure


def test_every_check_passes_and_leaves_the_base_as_it_was(subject) -> None:
    model = subject.model.train()
    model.model.layers[0].eval()
    before, modes = npt.base_hash(model), [module.training for module in model.modules()]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    failed = [str(found) for found in verify(subject) if not found.passed]
    assert failed == []
    assert npt.base_hash(model) == before and not is_attached(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state) and not torch.is_anomaly_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_check_that_cannot_look_has_failed(monkeypatch, subject) -> None:
    monkeypatch.setattr(training, "trace", lambda *_: [][0])
    found = check(subject, "explosion_named")
    assert (
        not found.passed
        and found.figure == "cannot be checked: IndexError: list index out of range"
    )


# --- the script


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    spec = importlib.util.spec_from_file_location("verify_fixes_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in set(CHECKS) - {"bounded", "replayed"}:
        monkeypatch.delitem(CHECKS, name)
    monkeypatch.setattr("sys.argv", [SCRIPT.name, *arguments])
    return module.main()


def test_the_script_prints_a_line_a_check(monkeypatch, capsys, llama_folder, load_model) -> None:
    line = ("--model_name", str(llama_folder), "--adapter_rank", "4", "--layers", "1")
    assert script(monkeypatch, *line) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == (
        "ok      multipliers stay within 1 - beta and 1 + beta, never 0  (0.5 to 1.5 for codes from"
        " -1e38 to 1e38; beta 0.5)"
    )
    assert second.startswith("ok      replayed samples") and last == "2 of 2 fixes hold"


def test_the_script_ends_with_1_if_a_fix_fails(
    monkeypatch, capsys, subject, llama_folder, load_model
) -> None:
    MISTAKES["bounded"](monkeypatch, subject)
    line = ("--model_name", str(llama_folder), "--no_use_quantization", "--json")
    assert script(monkeypatch, *line, "--mult_bound", "0.25") == 1
    figures = json.loads(capsys.readouterr().out)
    assert (figures["passed"], figures["total"]) == (1, 2)
    assert figures["checks"][0]["figure"] == "0 to 2 for codes from -1e38 to 1e38; beta 0.25"


def test_bad_input_to_the_script_is_one_line(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--model_name", "/no/such/folder") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("verify_fixes.py: error: ") and "/no/such/folder" in line
