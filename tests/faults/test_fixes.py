"""The checks pass on a sound package, and each of the earlier mistakes, made again, fails exactly
the checks that are about it.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import npt
from faults import bench, check_maths, check_training
from faults.bench import Base
from faults.check import Check, check
from faults.fixes import CHECKS, describe, open_base, print_checks, summary, verify
from npt.adapters import layer as adapted
from npt.adapters import modulation, stream
from npt.adapters.converted import is_attached
from npt.adapters.layer import NPTAdapter
from npt.config import BaseConfig, NPTConfig, TrainConfig
from npt.distill import hidden_losses as losses
from npt.distill import local, own_stream
from npt.distill.strategies import STRATEGIES
from npt.errors import ConfigError, ModelError
from npt.step import train_step
from npt.step.gradient_window import GradientWindow, MicroBatchFlags
from npt.step.guarded_update import norms_of
from npt.train.observers import StepMetrics

SCRIPT = Path(npt.__file__).parent.parent / "debug" / "verify_fixes.py"
NAMES = [c.__name__ for c in CHECKS]


def base_of(load_model: Any, quantization: str | None = None) -> Base:
    return Base(load_model(quantization), NPTConfig(rank=4, layers="1"), TrainConfig())


@pytest.fixture
def base(load_model) -> Base:
    return base_of(load_model)


def failing(
    base: Base, checks: Sequence[Callable[[Base], Check]] = CHECKS
) -> tuple[set[str], dict[str, str]]:
    """Names of the failing checks' functions, and what each check says."""
    found = dict(zip((c.__name__ for c in checks), verify(base, checks), strict=True))
    return {name for name, c in found.items() if not c.passed}, {
        name: c.detail for name, c in found.items()
    }


# --- a sound package


@pytest.mark.parametrize(
    ("quantization", "adapter_config", "config"),
    [
        (
            "nf4",
            NPTConfig(rank=64, layers="1,3", mult_bound=0.999),
            TrainConfig(strategy="end_to_end", logit_kl_weight=1.0),
        ),
        (
            "fp4",
            NPTConfig(
                rank=1, layers="0", targets=("gate",), modulation="additive", additive_scale=7.0
            ),
            # What checks have no use for does not disturb them.
            TrainConfig(
                regularization_lambda=1.0,
                max_grad_norm=1e-3,
                eval_steps=1,
                save_steps=1,
                log_steps=7,
                max_consecutive_bad=1,
                max_refused_share=0.0,
                skip_spikes=True,
            ),
        ),
        (
            None,
            NPTConfig(
                rank=4, layers="2", modulation="multiplicative", init_std_a=1.0, init_std_b=0.0
            ),
            TrainConfig(max_grad_norm=1e3),
        ),
    ],
)
def test_every_check_passes_whatever_the_settings(
    load_model, quantization, adapter_config, config
) -> None:
    bad, said = failing(Base(load_model(quantization), adapter_config, config))
    assert bad == set(), {name: said[name] for name in bad}


def test_a_base_is_described(load_model) -> None:
    assert "NF4 on cpu; layers 1, rank 4" in describe(base_of(load_model, "nf4"))


def test_what_is_looked_at_is_left_as_it_was(load_model) -> None:
    model = load_model("nf4").train()
    model.model.layers[0].eval()
    before, modes = npt.base_hash(model), [module.training for module in model.modules()]
    torch.manual_seed(7)
    state = torch.get_rng_state()
    verify(Base(model, NPTConfig(rank=4, layers="1"), TrainConfig()))
    assert (
        npt.base_hash(model) == before and [module.training for module in model.modules()] == modes
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert not is_attached(model)
    assert not torch.is_anomaly_enabled()
    assert all(p.grad is None for p in model.parameters())


# --- the earlier mistakes, made again

Sabotage = Callable[[pytest.MonkeyPatch, Base], Any]


def multiplier(form: Callable[[torch.Tensor], torch.Tensor]) -> Sabotage:
    sound = modulation.MULTIPLIERS["sigmoid"]
    other = replace(sound, function=lambda u, bound: form(u))
    return lambda patch, base: patch.setitem(modulation.MULTIPLIERS, "sigmoid", other)


def after_init(change: Callable[[NPTAdapter], None]) -> Sabotage:
    def sabotage(patch: pytest.MonkeyPatch, base: Base) -> None:
        honest = NPTAdapter.__init__

        def careless(self: NPTAdapter, *arguments: Any, **named: Any) -> None:
            honest(self, *arguments, **named)
            with torch.no_grad():
                change(self)

        patch.setattr(NPTAdapter, "__init__", careless)

    return sabotage


def larger_a(made: NPTAdapter) -> None:
    made.A.mul_(1.5)


def started_m(made: NPTAdapter) -> None:
    for weight in made.M.values():
        weight.fill_(0.01)


def unscaled(patch: pytest.MonkeyPatch, base: Base) -> None:
    honest = modulation.modulate
    patch.setattr(
        adapted,
        "modulate",
        lambda y, z, mult, add, bound, scale, form: honest(y, z, mult, add, bound, 1.0, form),
    )


def nmse(form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Sabotage:
    """Of the errors and energies, [N] each."""

    def careless(output: torch.Tensor, target: torch.Tensor, hidden: None = None) -> torch.Tensor:
        return form((output - target).square().sum(dim=-1), target.square().sum(dim=-1))

    def sabotage(patch: pytest.MonkeyPatch, base: Base) -> None:
        for module in (local, losses):  # the figure, and the loss
            patch.setattr(module, "nmse_per_token", careless)

    return sabotage


def transaction_with(**changes: Any) -> Sabotage:
    def sabotage(patch: pytest.MonkeyPatch, base: Base) -> None:
        honest = GradientWindow.__init__

        def careless(self: Any, *arguments: Any, **named: Any) -> None:
            honest(self, *arguments, **named)
            for name, value in changes.items():
                setattr(self, name, value)

        patch.setattr(GradientWindow, "__init__", careless)

    return sabotage


def layer_in(dtype: torch.dtype, unseen: bool) -> Sabotage:
    def sabotage(patch: pytest.MonkeyPatch, base: Base) -> None:
        base.model.model.layers[2].mlp.up_proj.compute_dtype = dtype
        if unseen:
            patch.setattr(check_maths, "audit_precision", lambda model: None)

    return sabotage


def second_copy(patch: pytest.MonkeyPatch, base: Base) -> None:
    honest = bench.attach

    def careless(model: Any, config: NPTConfig) -> None:
        honest(model, config)
        model.teacher_embedding = copy.deepcopy(model.model.embed_tokens)

    patch.setattr(bench, "attach", careless)


def moving_base(patch: pytest.MonkeyPatch, base: Base) -> None:
    honest = STRATEGIES["local"]

    def careless(model: Any, *arguments: Any) -> Any:
        model.model.norm.weight.data.mul_(1.01)  # the local strategy itself does not read it
        return honest(model, *arguments)

    patch.setitem(STRATEGIES, "local", careless)


def masked(change: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]) -> Sabotage:
    """Of the mask, [B, 1, T, T] bool, and the validity of keys."""

    def sabotage(patch: pytest.MonkeyPatch, base: Base) -> None:
        honest = stream.create_causal_mask

        def careless(**named: Any) -> Any:
            mask = honest(**named)
            return mask if mask is None else change(mask, named["attention_mask"])

        patch.setattr(stream, "create_causal_mask", careless)

    return sabotage


def causal_only(mask: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(mask).tril()


def blank_first_row(mask: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    assert valid is not None
    mask = mask.clone()
    mask[0, :, int(valid[0].argmax())] = False
    return mask


def leaking(patch: pytest.MonkeyPatch, base: Base) -> None:
    """The content of a row, padding or not, moves the stream of the others by a little."""
    honest = local.open_stream

    def careless(model: Any, batch: Any) -> Any:
        made = honest(model, batch)
        leak = model.model.embed_tokens(batch.input_ids).mean(dim=(0, 1))
        return replace(made, hidden=made.clean(made.hidden + leak))

    for module in (local, own_stream):
        patch.setattr(module, "open_stream", careless)


def counting_padding(patch: pytest.MonkeyPatch, base: Base) -> None:
    honest = local.Sums.micro_batch

    def careless(self: Any) -> Any:
        return replace(honest(self), tokens=self._batch.input_ids.numel())

    patch.setattr(local.Sums, "micro_batch", careless)


def noisy(patch: pytest.MonkeyPatch, base: Base) -> None:
    """Each call gives another loss; not by torch's generator, which a micro-batch has its
    own of.
    """
    honest, calls = STRATEGIES["local"], itertools.count()

    def careless(model: Any, *arguments: Any) -> Any:
        sums = honest(model, *arguments)
        return replace(sums, loss=sums.loss * (1 + 1e-3 * next(calls)))

    patch.setitem(STRATEGIES, "local", careless)


def logged_loss(factor: Callable[[Any], float]) -> Sabotage:
    def sabotage(patch: pytest.MonkeyPatch, base: Base) -> None:
        honest = StepMetrics.line

        def careless(self: StepMetrics, result: Any, *arguments: Any) -> dict[str, Any]:
            metrics = honest(self, result, *arguments)
            return {**metrics, "loss": metrics["loss"] * factor(result)}

        patch.setattr(StepMetrics, "line", careless)

    return sabotage


def replaced(where: Any, name: str, value: Any) -> Sabotage:
    return lambda patch, base: patch.setattr(where, name, value)


def gated(gate: Callable[..., None], trusting: bool) -> Sabotage:
    """Micro-batches added to the window by `gate(window, scratch, flag)`; `trusting` takes every
    flag for good.
    """

    def sabotage(patch: pytest.MonkeyPatch, base: Base) -> None:
        def add(self: Any, sums: Any, sample_ids: tuple[str, ...] = ()) -> None:
            gradients = self.gradients
            norms = norms_of(gradients.scratch_views)
            flag = torch.isfinite(sums.loss) & torch.isfinite(
                torch.linalg.vector_norm(norms)
            ) | torch.tensor(trusting)
            gradients._renew()  # as the honest one does first
            for window, scratch in zip(gradients.sums, gradients.scratch, strict=True):
                gate(window, scratch, flag)
            self._ran.append(MicroBatchFlags(sums, flag, norms, self.place, sample_ids))
            self.place += 1

        patch.setattr(GradientWindow, "add", add)

    return sabotage


def by_multiplication(window: torch.Tensor, scratch: torch.Tensor, flag: torch.Tensor) -> None:
    window.add_(scratch * flag)


def uphill(patch: pytest.MonkeyPatch, base: Base) -> None:
    honest = STRATEGIES["local"]

    def careless(model: Any, *arguments: Any) -> Any:
        sums = honest(model, *arguments)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.neg_()
        return sums

    patch.setitem(STRATEGIES, "local", careless)


def lenient(change: Callable[[Any], None] = lambda model: None) -> Sabotage:
    def careless(model: Any, *arguments: Any) -> str:
        change(model)
        return "smoke test passed"

    return replaced(check_training, "smoke_test", careless)


def honest_but(change: Callable[[Any], None]) -> Sabotage:
    honest = check_training.smoke_test

    def careless(model: Any, *arguments: Any) -> str:
        try:
            return honest(model, *arguments)
        finally:
            change(model)

    return replaced(check_training, "smoke_test", careless)


def nudge(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].npt.A[0, 0] += 1.0


MISTAKES: dict[str, tuple[Sabotage, set[str]]] = {
    "1 + tanh": (multiplier(lambda u: 1 + torch.tanh(u)), {"bounded"}),
    "half a sigmoid": (multiplier(lambda u: 0.5 * torch.sigmoid(u) + 0.5), {"neutral"}),
    "a multiplier that is not finite": (
        multiplier(lambda u: 1.0 + 0.5 * (u / (1.0 + u.abs()))),
        {"bounded"},
    ),
    "a larger start": (after_init(larger_a), {"start"}),
    "a start off 0": (after_init(started_m), {"neutral", "start"}),
    "no alpha": (unscaled, {"scaled_additive"}),
    "an NMSE without a floor": (nmse(lambda error, energy: error / energy), {"normalised"}),
    "an NMSE of the whole batch": (
        nmse(lambda error, energy: (error.sum() / energy.sum()).expand(len(error))),
        {"normalised", "padding_uncounted", "logged"},
    ),
    "an error without a norm": (nmse(lambda error, energy: error), {"normalised"}),
    "no clipping": (transaction_with(max_grad_norm=math.inf), {"clipped"}),
    "clipping at twice the limit": (transaction_with(max_grad_norm=1.0), {"clipped"}),
    "a layer in fp16": (layer_in(torch.float16, unseen=False), {"in_fp32"}),
    "a layer in fp16 that the audit misses": (layer_in(torch.float16, unseen=True), {"in_fp32"}),
    "a layer in bf16 that the audit misses": (layer_in(torch.bfloat16, unseen=True), {"in_fp32"}),
    "a second copy": (second_copy, {"shared"}),
    "a base that moves": (moving_base, {"shared"}),
    "a mask that forgets padding": (masked(causal_only), {"keyed"}),
    "padding that leaks": (leaking, {"padding_unseen", "padding_uncounted", "logged"}),
    "padding that counts": (counting_padding, {"padding_uncounted", "logged", "smoke_tested"}),
    "a logged sum": (logged_loss(lambda result: len(result.survivors)), {"logged"}),
    "an average over what was refused": (
        logged_loss(lambda r: len(r.survivors) / r.micro_batches),
        {"averaged", "empty_refused"},
    ),
    "empty rows let through": (
        replaced(train_step, "find_fault", lambda batch, vocabulary: None),
        {"empty_refused"},
    ),
    "gating by multiplication": (gated(by_multiplication, trusting=False), {"refused"}),
    "no gating": (
        gated(lambda window, scratch, flag: window.add_(scratch), trusting=True),
        {"refused", "averaged"},
    ),
    "a safe mode that multiplies": (replaced(NPTConfig, "multiplicative", True), {"safe_mode"}),
    "a gradient that points uphill": (uphill, {"safe_mode", "smoke_tested"}),
    "blind to logits": (replaced(check_training, "logits_fault", lambda logits: None), {"watched"}),
    "blind to ids": (
        replaced(check_training, "find_fault", lambda batch, vocabulary: None),
        {"watched"},
    ),
    "blind to targets": (
        replaced(check_training, "target_fault", lambda targets, vocabulary: None),
        {"watched"},
    ),
    "blind to adapters": (
        replaced(check_training, "tensor_fault", lambda named: None),
        {"watched"},
    ),
    "blind to the base": (replaced(check_training, "base_fault", lambda model: None), {"watched"}),
    "an alarm at nothing": (
        replaced(check_training, "find_fault", lambda batch, vocabulary: "a feeling"),
        {"watched"},
    ),
    "a smoke test that passes all": (lenient(), {"smoke_tested"}),
    "a smoke test that leaves a trace": (honest_but(nudge), {"smoke_tested"}),
    "anomaly mode left on": (
        honest_but(lambda model: torch.autograd.set_detect_anomaly(True)),
        {"smoke_tested"},
    ),
}


@pytest.fixture
def anomaly_off():
    yield
    torch.autograd.set_detect_anomaly(False)


def in_turns(mistake: str) -> list[Callable[[Base], Check]]:
    """The checks that are about a mistake, and a sixth of the others: each of them meets a sixth of
    the mistakes that it must pass.
    """
    turn, about = list(MISTAKES).index(mistake) % 6, MISTAKES[mistake][1]
    return [c for number, c in enumerate(CHECKS) if c.__name__ in about or number % 6 == turn]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_checks_that_are_about_it_and_no_other(
    monkeypatch, load_model, anomaly_off, mistake
) -> None:
    sabotage, expected = MISTAKES[mistake]
    base = base_of(load_model, "nf4" if "in_fp32" in expected else None)
    sabotage(monkeypatch, base)
    bad, said = failing(base, in_turns(mistake))
    assert bad == expected, {name: said[name] for name in bad ^ expected}
    assert not any(said[name].startswith("cannot be checked") for name in bad), said


def test_every_check_can_fail() -> None:
    others = {"repeatable"}  # has a test of its own: what does not repeat itself fails many
    assert set().union(*(names for _, names in MISTAKES.values())) | others == set(NAMES)


def test_what_does_not_repeat_itself_is_said_to(monkeypatch, base) -> None:
    noisy(monkeypatch, base)
    bad, said = failing(base, [check_training.repeatable])
    assert "repeatable" in bad and "the loss differs the second time" in said["repeatable"]


def test_a_valid_token_without_a_key_is_found(monkeypatch, base) -> None:
    masked(blank_first_row)(monkeypatch, base)
    bad, said = failing(base, [check_training.keyed])
    assert "keyed" in bad and "may attend to nothing" in said["keyed"]


@pytest.mark.parametrize(
    ("mistake", "chosen", "figure"),
    [
        (
            "1 + tanh",
            check_maths.bounded,
            "m in [0, 2] for codes from -1e38 to 1e38; beta 0.5 allows [0.5, 1.5]",
        ),
        ("half a sigmoid", check_maths.neutral, "the first of them 0.75"),
        (
            "a layer in fp16 that the audit misses",
            check_maths.in_fp32,
            "model.layers.2.mlp.up_proj gives torch.float32 with",
        ),
        (
            "a layer in bf16 that the audit misses",
            check_maths.in_fp32,
            "which fp32 would be within 1e-05 of",
        ),
        (
            "an NMSE without a floor",
            check_maths.normalised,
            "the NMSE is nan for a teacher's state of size 0",
        ),
        ("a second copy", check_maths.shared, "32,768 bytes more than the base"),
        (
            "a mask that forgets padding",
            check_training.keyed,
            "padded on the left, valid tokens may attend to padding",
        ),
        (
            "gating by multiplication",
            check_training.refused,
            "loss: refused [(1, 'loss', 0), (1, 'norm', None)] instead of",
        ),
    ],
)
def test_the_figures_say_what_is_wrong(monkeypatch, load_model, mistake, chosen, figure) -> None:
    base = base_of(load_model, "nf4" if chosen is check_maths.in_fp32 else None)
    MISTAKES[mistake][0](monkeypatch, base)
    (found,) = verify(base, [chosen])
    assert not found.passed and figure in found.detail, found.detail


# --- what cannot be looked at


def test_a_check_that_raises_has_failed_and_says_what(base) -> None:
    @check("x", "y")
    def raising(base: Base) -> str:
        bench.Run(bench.Setting(vocabulary=128), base)
        raise RuntimeError("boom\nand more")

    assert verify(base, [raising]) == [
        Check("x", "y", False, "cannot be checked: RuntimeError: boom")
    ]
    assert not is_attached(base.model)


def test_a_mask_without_rows_cannot_be_checked_and_counts_as_failed(monkeypatch, base) -> None:
    masked(lambda mask, valid: valid)(monkeypatch, base)
    (found,) = verify(base, [check_training.keyed])
    assert (
        not found.passed
        and found.detail
        == "cannot be checked: the attention mask has shape [4, 20], no row of keys for each query"
    )


def test_adapters_that_cannot_learn_are_not_waved_through(load_model) -> None:
    dead = Base(
        load_model("nf4"),
        NPTConfig(rank=4, layers="1", init_std_a=0.0, init_std_b=0.0),
        TrainConfig(),
    )
    bad, said = failing(
        dead,
        [
            check_maths.neutral,
            check_maths.clipped,
            check_training.safe_mode,
            check_training.smoke_tested,
        ],
    )
    assert bad == {"clipped", "safe_mode", "smoke_tested"}
    assert said["clipped"] == "cannot be checked: the first gradient is 0"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((BaseConfig(), NPTConfig(residual="keep"), TrainConfig()), ConfigError, "--residual keep"),
        (
            (BaseConfig(), NPTConfig(rank=1000), TrainConfig()),
            ConfigError,
            "--adapter_rank is 1000",
        ),
        (
            (BaseConfig(model_name="/no/such/folder"), NPTConfig(), TrainConfig()),
            ModelError,
            "there is no model folder",
        ),
    ],
)
def test_what_could_not_be_trained_is_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        open_base(*arguments)


# --- what a user sees


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    spec = importlib.util.spec_from_file_location("verify_fixes_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", [SCRIPT.name, *arguments])
    return module.main()


@pytest.fixture
def small(load_model, llama_folder) -> tuple[str, ...]:
    return ("--model_name", str(llama_folder), "--adapter_rank", "4", "--layers", "1")


def test_the_script_prints_every_check_and_ends_with_0(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--adapter_rank", "4", "--layers", "1", "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert (
        read["passed"]
        == read["total"]
        == len(CHECKS)
        == len(read["checks"])
        == len({c["name"] for c in read["checks"]})
    )
    assert all(
        set(c) == {"name", "earlier", "passed", "detail"} and all(c.values())
        for c in read["checks"]
    )


def test_the_script_ends_with_1_and_says_what_failed(monkeypatch, capsys, small) -> None:
    # a shift of the stream is rounded to fp16 there, as small steps on it are
    form = ("--targets", "gate,up,down")
    assert script(monkeypatch, *small, *form, "--no_use_quantization", "--use_fp16") == 1
    text = capsys.readouterr().out
    assert "\nfailed: everything computes in fp32. Earlier: activations beyond 65504" in text
    assert "unquantised on cpu; layers 1, rank 4" in text and text.endswith(
        f"passed {len(CHECKS) - 1} of {len(CHECKS)}\n"
    )


def test_bad_input_to_the_script_is_one_line(monkeypatch, capsys, small) -> None:
    assert script(monkeypatch, "--model_name", "/no/such/folder") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert script(monkeypatch, *small, "--mult_bound", "1.5") == 2
    assert "--mult_bound is 1.5" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        # a setting that no check uses is refused, not ignored
        script(monkeypatch, "--output_dir", "x")
    assert stop.value.code == 2


def test_the_table_holds_every_check_in_a_hundred_columns() -> None:
    checks = [
        Check("a name", "what was", True, "figures " * 30),
        Check("another", "what was", False, "x" * 300),
    ]
    out = io.StringIO()
    print_checks(Console(file=out, width=100), checks, "title")
    lines = out.getvalue().splitlines()
    assert lines[-1] == "passed 1 of 2" and "NO" in out.getvalue() and "…" not in out.getvalue()
    assert max(len(line) for line in lines if line.startswith("│")) <= 100
    assert summary(checks)["passed"] == 1
