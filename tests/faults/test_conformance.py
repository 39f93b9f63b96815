"""The test of skipping a batch: it passes our guard, sees what others lose, and refuses an adapter
that does not work in one line.
"""

import json
from pathlib import Path

import pytest
import torch

import conformance
from conformance_guards import trial
from conformance_guards.difference import lost
from conformance_guards.faults import FAULTS, batch, spoilt
from conformance_guards.run import SETTINGS, new_run
from conformance_guards.trial import Cell, Entry, GuardError, Processes, judged

LOOP = """
import torch
class Own:
    def __init__(self, run):
        self.run = run
    def step(self, window):
        for batch in window:
            loss = self.run.model(**batch) / len(window)
            if {check}:
                loss.backward()
        if any(p.grad is not None for p in self.run.net.parameters()):
            torch.nn.utils.clip_grad_norm_(self.run.net.parameters(), self.run.max_norm)
            self.run.optimizer.step()
            self.run.after_step()
        self.run.optimizer.zero_grad()
"""


def cell(guard: str, fault: str, setting: str) -> Cell:
    with Processes(guard) as processes:
        return judged(guard, FAULTS[fault], SETTINGS[setting], processes)


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["conformance.py", *arguments])
    return conformance.main()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(LOOP.format(check="torch.isfinite(loss)"))
    return path


@pytest.mark.parametrize(
    ("fault", "setting"),
    [("loss", "dropout"), ("moments", "schedule"), ("overflow", "scaler"), ("norm", "ema")],
)
def test_our_guard_is_equal(fault, setting) -> None:
    found = cell("npt.guard", fault, setting)
    assert (found.verdict, found.lost) == ("equal", [])


def test_our_guard_is_equal_in_lightning() -> None:
    pytest.importorskip("lightning")
    assert cell("npt.guard in Lightning", "norm", "ema").verdict == "equal"


@pytest.mark.parametrize("fault", ["one-process", "window"])
def test_our_guard_is_equal_in_two_processes(fault) -> None:
    assert cell("npt.guard", fault, "two-processes").verdict == "equal"


@pytest.mark.parametrize(
    ("guard", "fault", "setting", "word"),
    [
        ("no guard", "loss", "plain", "weights not finite"),
        ("isfinite(loss)", "gradient", "plain", "moments not finite"),
        ("isfinite(loss)", "norm", "plain", "bad batch stepped"),
        ("isfinite(loss)", "loss", "dropout", "random state changed"),
        ("isfinite(loss)", "row", "batch-norm", "buffers not finite"),
        ("isfinite(loss)", "exception", "plain", "ended by FloatingPointError"),
        ("error_if_nonfinite", "loss", "accumulation", "other micro-batches of the window lost"),
        ("GradScaler", "loss", "schedule", "schedule advanced"),
        ("GradScaler", "loss", "ema", "EMA advanced"),
        ("GradScaler", "loss", "scaler", "loss scale changed"),
    ],
)
def test_what_another_guard_loses_is_told(guard, fault, setting, word) -> None:
    found = cell(guard, fault, setting)
    assert found.verdict == "lost" and word in found.lost


def test_a_bare_check_of_the_loss_is_equal_where_it_is_enough() -> None:
    assert cell("isfinite(loss)", "loss", "plain").verdict == "equal"
    assert cell("isfinite(loss)", "spike", "plain").verdict == "not claimed"
    assert cell("isfinite(loss)", "one-process", "plain").verdict == "n/a"


def test_a_process_that_waits_for_one_that_skips_is_told() -> None:
    assert cell("isfinite(loss)", "one-process", "two-processes").lost == ["hangs"]


@pytest.mark.parametrize("part", ["weights", "buffers", "optimizer", "random", "scheduler", "ema"])
def test_every_part_of_the_state_is_compared(part) -> None:
    setting = trial.replace(SETTINGS["schedule"], ema=True, batch_norm=True)
    state, other = new_run(setting).state(), new_run(setting).state()
    assert lost(state, other) == []
    changed = {
        "weights": lambda: other["weights"]["last.bias"].add_(1),
        "buffers": lambda: other["buffers"]["norm.num_batches_tracked"].add_(1),
        "optimizer": lambda: other["optimizer"]["param_groups"][0].update(lr=0.5),
        "random": lambda: other.update(random=torch.zeros_like(other["random"])),
        "scheduler": lambda: other["scheduler"].update(last_epoch=5),
        "ema": lambda: other["ema"]["module.last.bias"].add_(1),
    }
    changed[part]()
    assert len(lost(state, other)) == 1


def test_the_buffer_fault_shows_in_the_buffer_only() -> None:
    run = new_run(SETTINGS["batch-norm"])
    loss = run.model(**spoilt(batch((0, 0), 0), "buffer"))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in run.net.parameters())
    assert not torch.isfinite(run.net.norm.running_var).all()


def test_a_guard_of_ones_own_is_tested(own, monkeypatch, capsys) -> None:
    guard = ["--guard", f"{own}:Own"]
    assert script(monkeypatch, *guard, "--only", "loss,plain") == 0
    assert "1 of 1 equal" in capsys.readouterr().out
    assert script(monkeypatch, *guard, "--only", "loss,gradient,plain", "--json") == 1
    (figures,) = json.loads(capsys.readouterr().out)["guards"].values()
    assert (figures["equal"], figures["total"]) == (1, 2)
    assert figures["faults"]["loss"]["settings"] == {"plain": "equal"}
    assert "weights not finite" in figures["faults"]["gradient"]["settings"]["plain"]


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("loss.nonsense", "AttributeError: 'Tensor' object has no attribute 'nonsense'"),
        ("False", "its weights are not those of a plain loop"),
    ],
)
def test_a_broken_adapter_is_one_line(check, words, own, monkeypatch, capsys) -> None:
    own.write_text(LOOP.format(check=check))
    with pytest.raises(SystemExit) as ended:
        script(monkeypatch, "--guard", f"{own}:Own", "--only", "loss,plain")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and words in line and "without a fault, in plain" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--guard", "nonsense"), "there is no guard 'nonsense'"),
        (("--guard", "none/such.py:Own"), "none/such.py does not exist"),
        (("--guard", "OWN:Other"), "has no class Other"),
        (("--guard", "OWN:torch"), "has no class torch"),
        (("--only", "loss,nonsense"), "there is no fault or setting 'nonsense'"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(
    arguments, words, own, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        script(monkeypatch, *(each.replace("OWN", str(own)) for each in arguments))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and words in line


def test_a_class_without_a_step_is_refused(own) -> None:
    own.write_text("class Own: pass\n")
    with pytest.raises(GuardError, match="no method step"):
        trial.load(f"{own}:Own")


def test_a_guard_that_is_not_installed_is_left_out_and_named(monkeypatch, capsys) -> None:
    entries = {"npt.guard": trial.GUARDS["npt.guard"], "absent": Entry("a:B", "no_such_package")}
    monkeypatch.setattr(trial, "GUARDS", entries)
    monkeypatch.setattr(conformance, "GUARDS", entries)
    assert script(monkeypatch, "--only", "loss,plain") == 0
    assert "left out: absent (no_such_package is not installed)" in capsys.readouterr().out


def test_the_list_names_every_fault(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--list") == 0
    out = capsys.readouterr().out
    assert [name for name in FAULTS if f"{name} " not in out] == []
