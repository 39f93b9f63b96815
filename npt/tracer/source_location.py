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

    def completed_by(self, other: Place) -> Place:
        """Return this place, with what is unknown from another."""
        return Place(self.module or other.module, self.source or other.source)


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
    user_code = recomputing = nested = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        nested = code.co_name == _ENGINE
        if nested or file in _TRACER:
            break
        if not file.startswith(_OBSERVERS):
            if not file.startswith(_LIBRARIES):
                user_code = True
                source = source or _line(code, frame.f_lasti)
            if not file.startswith(_DISPATCH):
                # an operation of a library, if no user code asked for it
                fallback = fallback or _line(code, frame.f_lasti)
            recomputing |= file.endswith(_CHECKPOINT)
            if module is None:
                module = _module(frame, names)
        frame = frame.f_back
    return Stack(Place(module or "", source or fallback), user_code, recomputing, nested)


def _module(frame: FrameType, names: Mapping[int, str]) -> str | None:
    """Return the module that a frame works for: `self`, or the first argument. If that is the whole
    model, use the variable of a loop around the line. Other locals mislead: after a loop over
    layers, the last layer is still a local.
    """
    code = frame.f_code
    values = frame.f_locals
    first_argument = code.co_varnames[: min(code.co_argcount, 1)]
    module: str | None = None
    for variable in ("self", *first_argument):
        if module is None:
            module = names.get(id(values.get(variable)))
    if module:
        return module
    line = frame.f_lineno
    # the innermost loop comes last
    for start, end, variable in reversed(_loops(code.co_filename)):
        if start <= line <= end:
            looped = names.get(id(values.get(variable)))
            if looped is not None:
                return looped
    return module


@functools.lru_cache(maxsize=256)
def _loops(file: str) -> list[tuple[int, int, str]]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    loops = []
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For | ast.AsyncFor):
            continue
        start = loop.body[0].lineno
        end = loop.body[-1].end_lineno or 0
        for variable in ast.walk(loop.target):
            if isinstance(variable, ast.Name):
                loops.append((start, end, variable.id))
    return sorted(loops)


@functools.lru_cache(maxsize=4096)
def _line(code: CodeType, instruction: int) -> str:
    """Return `file.py:12 in function: expression`."""
    positions = islice(code.co_positions(), instruction // 2, None)
    expression: Any = Positions(*next(positions))
    line = expression.lineno
    source = "".join(linecache.getlines(code.co_filename))
    text = ast.get_source_segment(source, expression) if source else None
    if not text:
        text = linecache.getline(code.co_filename, line)
    text = " ".join(text.split())
    if len(text) > _TEXT_MAX:
        text = text[: _TEXT_MAX - 3] + "..."
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
        # a gradient may come transposed
        self.others = {*others, *(shape[::-1] for shape in others)}
        mask: Any = None
        if isinstance(batch, Batch):
            mask = batch.attention_mask
            shape = batch.input_ids.shape
            if len(shape) == 2:
                self.shape = (shape[0], shape[1])
            self.rows = batch.valid_index.tolist()
            self.samples = batch.sample_ids
            # a malformed batch predicts at no known position
            if shape == mask.shape == batch.labels.shape == batch.position_ids.shape:
                self.scored = batch.scored_index.tolist()
        elif isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            for name, dimensions in (("inputs_embeds", 3), ("input_ids", 2)):
                value = batch.get(name)
                if isinstance(value, Tensor) and value.ndim == dimensions:
                    self.shape = (value.shape[0], value.shape[1])
        self.valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def without_padding(self, tensor: Tensor) -> Tensor:
        """Return the tensor with 0 at padding, for the first four shapes of `locate`."""
        shape = tuple(tensor.shape)
        if self.valid is None or shape in self.others or not shape:
            return tensor
        b, t = self.valid.shape
        if len(shape) == 4 and shape[::2] == (b, t):
            heads = shape[1]
        elif len(shape) == 3 and shape[0] % b == 0 and shape[1] == t:
            heads = shape[0] // b
        elif shape[:2] == (b, t) or shape[0] == b * t:
            heads = 1
        else:
            return tensor
        padded = ~self.valid.to(tensor.device)[:, None, :, None]
        of_heads = tensor.reshape(b, heads, t, -1)
        return of_heads.masked_fill(padded, 0.0).reshape(shape)

    def locate(self, shape: tuple[int, ...], index: tuple[int, ...]) -> Owner:
        """Return the owner of an element, as far as the shape tells.

        Known shapes: [B, T, ...], attention's [B, heads, T, ...] and [B * heads, T, ...], and
        flattened [B * T, ...]. If the batch gathers tokens: valid ones [N, ...], teacher's and
        student's stacked [2N, ...], and predicting positions [S, ...]. For [B, ...] only the row.
        """
        if self.shape is None or not index or shape in self.others:
            return Owner()
        readings = list(self._readings(shape, index))
        rows = {row for row, _ in readings}
        tokens = {token for _, token in readings}
        if not readings and shape[0] == self.shape[0] != self.shape[1]:
            rows = {index[0]}
        if len(rows) != 1:
            return Owner()
        row = rows.pop()
        token = tokens.pop() if len(tokens) == 1 else None
        sample = self.samples[row] if row < len(self.samples) else None
        return Owner(row, token, sample)

    def _readings(
        self, shape: tuple[int, ...], index: tuple[int, ...]
    ) -> Iterator[tuple[int, int]]:
        assert self.shape is not None
        b, t = self.shape
        first = index[0]
        if shape[:2] == (b, t):
            yield first, index[1]
        if len(shape) == 4 and shape[::2] == (b, t):
            yield first, index[2]
        if len(shape) == 3 and shape[0] > b and shape[0] % b == 0 and shape[1] == t:
            heads = shape[0] // b
            yield first // heads, index[1]
        valid = len(self.rows)
        if shape[0] in (valid, 2 * valid):
            yield divmod(self.rows[first % valid], t)
        if shape[0] == len(self.scored):
            yield divmod(self.scored[first], t)
        if shape[0] == b * t:
            yield divmod(first, t)
