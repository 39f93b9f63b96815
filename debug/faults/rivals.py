"""What other ways to hunt a NaN say about the same planted faults.

Every tool gets the same pass of the same model, as `npt.trace` does (hooks are marked as hooks that
only look, since a converted layer computes otherwise around hooks that it does not know). It is
credited with whatever
its report names, in its own words: `Log` for torch's `LogBackward0` and `linear` for `addmm` count
as the operation. If the pass itself raises, as for an id outside the vocabulary, all are credited
with the traceback.

The tools, with what they can see:

- anomaly mode: torch's own, which checks the gradients of every backward function for NaN;
- DebugUnderflowOverflow: transformers' hooks, which check inputs, weights and outputs of modules;
- forward hooks: the ten lines that anyone would write first, which check the outputs of modules;
- sherlorch: a tracer of the functions of a forward pass, if it is installed. It is no dependency.
"""

from __future__ import annotations

import io
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.debug_utils import DebugUnderflowOverflow

from faults.module_cases import Subject
from faults.places import Truth
from npt.hooks import only_looks, unfused
from npt.tracer.passes import default_run, ready, sinks_of, untouched
from npt.tracer.tensors import Badness, judge, tensors_in
from npt.tracer.verdict import Verdict


@dataclass(frozen=True)
class Finding:
    """What a report names; None for what it does not. module: "" is code outside of modules."""

    operation: str | None = None
    module: str | None = None
    line: str | None = None
    phase: str | None = None


Pass = Callable[[], Any]
"""Runs the model and its backward."""
Tool = Callable[[nn.Module, Callable[[], Any], Pass], Finding | None]
"""Takes the model, its forward and loss, and the whole pass. Returns None if it reports nothing."""


# --- the tools


def anomaly_mode(_model: nn.Module, _forward: Callable[[], Any], whole: Pass) -> Finding | None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.set_detect_anomaly(True):
                whole()
        except RuntimeError as error:
            named = re.match(r"Function '(\w+)' returned nan values", str(error))
            if named is None:
                raise
            # Of a double backward it prints two tracebacks, and the second is of the forward.
            told = [_user_line(str(warning.message)) for warning in caught]
            lines = [line for line in told if line is not None]
            return Finding(named[1], None, lines[-1] if lines else None, "backward")
    return None


class _Looking(DebugUnderflowOverflow):
    @only_looks
    def forward_hook(self, *arguments: Any) -> None:
        super().forward_hook(*arguments)


def debug_underflow_overflow(
    model: nn.Module, _forward: Callable[[], Any], whole: Pass
) -> Finding | None:
    printed = io.StringIO()
    try:
        with _hooks_removed(model), redirect_stdout(printed):
            _Looking(model, max_frames_to_save=1)
            whole()
    except ValueError as error:
        if not str(error).startswith("DebugUnderflowOverflow: inf/nan"):
            raise
        report = printed.getvalue()
        frames = re.findall(r"^ {17} (\S*) \w+$", report, re.MULTILINE)
        what = report.partition(" has ")[0]
        of_pass = what.startswith(("input", "output"))
        return Finding(None, frames[-1], None, "forward" if of_pass else "state")
    return None


def forward_hooks(model: nn.Module, _forward: Callable[[], Any], whole: Pass) -> Finding | None:
    bad: list[str] = []

    def check(name: str) -> Callable[..., None]:
        @only_looks
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if any(judge(tensor) != Badness.FINE for _, tensor in tensors_in(output)):
                bad.append(name)

        return hook

    with _hooks_removed(model):
        for name, module in model.named_modules():
            module.register_forward_hook(check(name))
        whole()
    return Finding(None, bad[0], None, "forward") if bad else None


def sherlorch(model: nn.Module, forward: Callable[[], Any], _whole: Pass) -> Finding | None:
    """Diagnose the loss, as its README does. Of several operations, the first counts."""
    package = import_module("sherlorch")
    with package.trace(capture_stack=True) as tracker:
        tracker.watch(model, name="root")
        for each in model.modules():
            for hook in (*each._forward_hooks.values(), *each._forward_pre_hooks.values()):
                if str(hook.__module__).startswith("sherlorch"):
                    only_looks(hook)
        result = forward()
        loss = [tensor for _, tensor in tensors_in(result) if tensor.ndim == 0][:1]
        spoilt = bool(loss) and tracker.has_issue(loss[0])
        culprits = tracker.diagnose(loss[0]).culprits if spoilt else []
    if not culprits:
        return None
    first = min(culprits, key=lambda node: node.seq)
    path, _, number = (first.location or "").rpartition(":")
    line = f"{Path(path).name}:{number}" if path else None
    module = (first.module_path or "").removeprefix("root").removeprefix(".")
    return Finding(first.op_name, module, line, "forward")


RIVALS: dict[str, Tool] = {
    "anomaly mode": anomaly_mode,
    "DebugUnderflowOverflow": debug_underflow_overflow,
    "forward hooks": forward_hooks,
}
if find_spec("sherlorch"):
    RIVALS["sherlorch"] = sherlorch

_LIBRARIES = tuple(
    str(Path(str(spec.origin)).parent)
    for spec in map(find_spec, ("torch", "bitsandbytes", "sherlorch"))
    if spec
)


def _user_line(report: str) -> str | None:
    """Return the innermost line of a printed traceback that is not a library's."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', report)
    own = [(path, number) for path, number in lines if not path.startswith(_LIBRARIES)]
    return f"{Path(own[-1][0]).name}:{own[-1][1]}" if own else None


@contextmanager
def _hooks_removed(model: nn.Module) -> Iterator[None]:
    """Remove the forward hooks that are set inside; transformers' tool keeps no handles."""
    before = [(module, set(module._forward_hooks)) for module in model.modules()]
    try:
        yield
    finally:
        for module, kept in before:
            for key in set(module._forward_hooks) - kept:
                del module._forward_hooks[key]


# --- asking them


def ask(tool: Tool, subject: Subject) -> Finding | None:
    """Let a tool look at one pass, and leave the model as it was."""
    model, batch, forward = subject.model, subject.batch, subject.run
    if forward is None:
        batch = ready(model, batch)
        forward = default_run(model, batch)
    try:
        # `npt.trace` too computes the embedded model's adapters operation by operation
        with unfused(), untouched(model, batch):
            return tool(model, forward, lambda: sinks_of(model, batch, forward()))
    except IndexError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not frames[-1].filename.startswith(_LIBRARIES):
            raise
        report = "".join(traceback.format_tb(error.__traceback__))
        return Finding(frames[-1].name, None, _user_line(report), "data")


def of_verdict(verdict: Verdict | None) -> Finding | None:
    """Return what `npt.trace` names."""
    if verdict is None:
        return None
    named = bool(verdict.operation)
    return Finding(
        operation=verdict.operation or None,
        module=verdict.module if named else None,
        line=verdict.source.partition(" in ")[0] or None,
        phase=verdict.phase,
    )


# --- scoring

_ALIASES = {
    "native_batch_norm": ("batch_norm", "NativeBatchNormBackward0"),
    "nll_loss_forward": ("cross_entropy", "nll_loss", "NllLossBackward0"),
    "bmm": ("matmul", "baddbmm"),
    "mm": ("matmul", "linear", "addmm"),
    "gemm_4bit": ("matmul_4bit", "MatMul4Bit", "linear"),
    "_to_copy": ("to", "half", "ToCopyBackward0"),
    "div": ("truediv", "true_divide"),
    "div_": ("itruediv",),
    "exp": ("OwnSoftplusBackward",),
    "mul": ("AmplifyBackward", "rmul"),
}
"""Other names that count for an operation: a function of torch that is little more, its backward,
or the custom function that holds it.
"""

_PHASES = {"recomputation": {"recomputation", "backward"}}


@dataclass(frozen=True)
class Score:
    """What a finding has right. line: None if the fault is in no line of the demo's own code."""

    said: Finding | None
    operation: bool
    module: bool
    line: bool | None
    phase: bool


def score(finding: Finding | None, truth: Truth, line: str | None) -> Score:
    """Compare a finding with the true place."""
    said = finding or Finding()
    phases = _PHASES.get(truth.phase, {truth.phase})
    if truth.cause == "masked gradient":  # forward hides it, and backward shows it
        phases = {"forward", "backward"}
    return Score(
        finding,
        operation=said.operation is not None and _plain(said.operation) in _names(truth.operation),
        module=said.module == truth.module,
        line=None if line is None else said.line == line,
        phase=said.phase in phases,
    )


def _names(operation: str) -> set[str]:
    """Return every accepted name: of `div in SqrtBackward0`, also `sqrt`."""
    name, _, node = operation.partition(" in ")
    accepted = (
        (operation, node, *_ALIASES.get(name, ())) if node else (name, *_ALIASES.get(name, ()))
    )
    return {_plain(each) for each in accepted if each}


def _plain(name: str) -> str:
    """Return a name without what its layer of torch adds: `LogBackward0` and `log_` are `log`."""
    name = re.sub(r"(Backward\d*|\.default)$", "", name)
    return name.replace("_", "").lower()
