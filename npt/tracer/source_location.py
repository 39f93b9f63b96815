"""The place of an operation: its module and source line, and the token of an element.

Module and line are read from the Python frames while the operation runs. Nothing is installed in
the model, and code between modules, such as a residual sum, is located as exactly as code in one.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dis import Positions
from importlib.util import find_spec
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npt.batch import Batch


def _folder(file: str) -> str:
    return os.path.dirname(os.path.abspath(file)) + os.sep


_HERE = _folder(__file__)
_OBSERVERS = tuple(
    f"{_HERE}{name}.py"
    for name in ("against", "ledger", "operations", "tensors", "source_location")
)
_GUARD = _folder(os.path.dirname(_HERE)) + "guard" + os.sep
_TRACER = (f"{_HERE}trace.py", f"{_HERE}passes.py")
_LIBRARIES = tuple(
    _folder(str(spec.origin)) for spec in map(find_spec, ("torch", "bitsandbytes")) if spec
)
# Files between an operation and the mode that observes it.
_DISPATCH = tuple(
    os.path.join(_LIBRARIES[0], name)
    for name in ("_dynamo", "_compile.py", "_ops.py", "utils" + os.sep + "_python_dispatch")
)
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")
_ENGINE = "_engine_run_backward"
"""The torch function that enters the autograd engine. Frames below it run in backward; those above
only started it.
"""

_TEXT_MAX = 160


class Place(NamedTuple):
    """The dotted name of a module and a line of Python; empty if unknown."""

    module: str = ""
    source: str = ""


def layer_of(name: str) -> int | None:
    """Return the decoder layer's index in a dotted name: its first integer part."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(number[1]) if number else None


class Stack(NamedTuple):
    """A summary of the Python frames around an operation.

    Attributes:
        place: the first module, and the first line that is not a library's.
        user_code: whether such a line runs inside the engine: a hook or custom function.
        recomputing: whether a checkpoint runs its forward again.
        nested: whether the engine was entered from Python on this thread.
    """

    place: Place
    user_code: bool
    recomputing: bool
    nested: bool


def read_stack(frame: FrameType | None, names: Mapping[int, str]) -> Stack:
    """Walk outwards from `frame` to where the engine or the trace was entered."""
    module: str | None = None
    source = fallback = ""
    user_code = recomputing = False
    while (
        frame is not None
        and frame.f_code.co_name != _ENGINE
        and frame.f_code.co_filename not in _TRACER
    ):
        file = frame.f_code.co_filename
        if not file.startswith(_OBSERVERS):
            if not file.startswith(_LIBRARIES):
                user_code, source = True, source or _line(frame.f_code, frame.f_lasti)
            if not file.startswith(_DISPATCH):
                fallback = fallback or _line(frame.f_code, frame.f_lasti)
            recomputing |= file.endswith(_CHECKPOINT)
            module = _module(frame, names) if module is None else module
        frame = frame.f_back
    nested = frame is not None and frame.f_code.co_name == _ENGINE
    return Stack(Place(module or "", source or fallback), user_code, recomputing, nested)


def _module(frame: FrameType, names: Mapping[int, str]) -> str | None:
    """Return the module that a frame works for: `self`, or the first argument. If that is the whole
    model, use the variable of a loop around the line. Other locals mislead: after a loop over
    layers, the last layer is still a local.
    """
    code, line, variables = frame.f_code, frame.f_lineno, frame.f_locals
    first = ("self", *code.co_varnames[: min(code.co_argcount, 1)])
    modules = [names.get(id(variables.get(variable))) for variable in first]
    module = next((name for name in modules if name is not None), None)
    if module:
        return module
    around = [name for start, end, name in _loops(code.co_filename) if start <= line <= end]
    looped = (names.get(id(variables.get(variable))) for variable in reversed(around))
    return next((name for name in looped if name is not None), module)


@functools.lru_cache(maxsize=256)
def _loops(file: str) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return sorted(
        (loop.body[0].lineno, loop.body[-1].end_lineno or 0, name.id)
        for loop in ast.walk(tree)
        if isinstance(loop, ast.For | ast.AsyncFor)
        for name in ast.walk(loop.target)
        if isinstance(name, ast.Name)
    )


@functools.lru_cache(maxsize=4096)
def _line(code: CodeType, instruction: int) -> str:
    """Return `file.py:12 in function: expression`."""
    expression: Any = Positions(*next(islice(code.co_positions(), instruction // 2, None)))
    source, line = "".join(linecache.getlines(code.co_filename)), expression.lineno
    text = ast.get_source_segment(source, expression) if source else None
    text = text or linecache.getline(code.co_filename, line)
    text = " ".join(text.split())
    text = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    folder, name = os.path.split(code.co_filename)
    if os.path.basename(folder).startswith("ipykernel_"):  # a notebook cell, named by a number
        name = "cell"
    return f"{name}:{line} in {code.co_qualname}: {text}"


def raised_at(error: BaseException) -> tuple[str, dict[str, Tensor]]:
    """Return the innermost line that an error passed outside of torch and the guard, and all
    tensors in variables of the frames that it passed, by name.
    """
    place = ""
    # one that is always there, as a pass must give something to look at
    tensors = {"of the pass": torch.zeros(())}
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        for name, value in trace.tb_frame.f_locals.items():
            if isinstance(value, Tensor):
                tensors[f"{name} in {code.co_name}"] = value
        if not code.co_filename.startswith((*_LIBRARIES, _GUARD)):
            place = _line(code, trace.tb_lasti)
        trace = trace.tb_next
    return place, tensors


class Owner(NamedTuple):
    """The row, token and sample of an element; None if unknown."""

    row: int | None = None
    token: int | None = None
    sample: str | None = None


class Tokens:
    """Find the token and sample that a tensor's element belongs to, from the tensor's shape.

    An ambiguous shape gives no answer, since a wrong token is worse than none.

    Args:
        others: shapes of tensors without tokens, such as weights and their gradients.

    Attributes:
        shape: (B, T), if known.
        rows: flat positions of the valid tokens.
        scored: flat positions whose next token is predicted.
        valid: [B, T] bool, False for padding; None if the batch does not tell.
    """

    def __init__(self, batch: Any = None, others: Collection[tuple[int, ...]] = ()):
        self.shape: tuple[int, int] | None = None
        self.rows: list[int] = []
        self.scored: list[int] = []
        self.samples: tuple[str, ...] = ()
        self.others = {*others, *(tuple(reversed(shape)) for shape in others)}
        mask = batch.attention_mask if isinstance(batch, Batch) else None
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else mask
        self.valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if isinstance(batch, Batch):
            shape = batch.input_ids.shape
            self.shape = (shape[0], shape[1]) if len(shape) == 2 else None
            self.rows, self.samples = batch.valid_index.tolist(), batch.sample_ids
            parts = batch.labels, batch.attention_mask, batch.position_ids
            if all(shape == part.shape for part in parts):
                self.scored = batch.scored_index.tolist()
        elif isinstance(batch, Mapping):
            for name, states in (("inputs_embeds", 3), ("input_ids", 2)):
                value = batch.get(name)
                if isinstance(value, Tensor) and value.ndim == states:
                    self.shape = (value.shape[0], value.shape[1])

    def without_padding(self, tensor: Tensor) -> Tensor:
        """Return the tensor with 0 at padding, for the first four shapes of `locate`."""
        shape = tuple(tensor.shape)
        if self.valid is None or shape in self.others or not shape:
            return tensor
        b, t = self.valid.shape
        of_heads = len(shape) == 4 and shape[::2] == (b, t)
        stacked = len(shape) == 3 and shape[0] % b == 0 and shape[1] == t
        if not (shape[:2] == (b, t) or shape[0] == b * t or of_heads or stacked):
            return tensor
        heads = shape[1] if of_heads else shape[0] // b if stacked else 1
        padded = ~self.valid.to(tensor.device)[:, None, :, None]
        return tensor.reshape(b, heads, t, -1).masked_fill(padded, 0.0).reshape(shape)

    def locate(self, shape: tuple[int, ...], index: tuple[int, ...]) -> Owner:
        """Return the owner of an element, as far as the shape tells.

        Known shapes: [B, T, ...], attention's [B, heads, T, ...] and [B * heads, T, ...], and
        flattened [B * T, ...]. If the batch gathers tokens: valid ones [N, ...], teacher's and
        student's stacked [2N, ...], and predicting positions [S, ...]. For [B, ...] only the row.
        """
        if self.shape is None or not index or shape in self.others:
            return Owner()
        readings = set(self._readings(shape, index))
        rows, tokens = {row for row, _ in readings}, {token for _, token in readings}
        if not readings and shape[0] == self.shape[0] != self.shape[1]:
            rows = {index[0]}
        row = rows.pop() if len(rows) == 1 else None
        token = tokens.pop() if len(tokens) == 1 and row is not None else None
        sample = self.samples[row] if row is not None and row < len(self.samples) else None
        return Owner(row, token, sample)

    def _readings(
        self, shape: tuple[int, ...], index: tuple[int, ...]
    ) -> Iterator[tuple[int, int]]:
        assert self.shape is not None
        (b, t), n = self.shape, len(self.rows)
        if len(shape) > 1 and shape[:2] == (b, t):
            yield index[0], index[1]
        if len(shape) == 4 and shape[0] == b and shape[2] == t:
            yield index[0], index[2]
        if len(shape) == 3 and shape[0] > b and shape[0] % b == 0 and shape[1] == t:
            yield index[0] // (shape[0] // b), index[1]
        flat = []
        if n and shape[0] in (n, 2 * n):
            flat.append(self.rows[index[0] % n])
        if self.scored and shape[0] == len(self.scored):
            flat.append(self.scored[index[0]])
        if shape[0] == b * t:
            flat.append(index[0])
        yield from (divmod(position, t) for position in flat)
