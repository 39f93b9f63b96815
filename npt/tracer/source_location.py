"""The place of an operation: its module and source line, and the token of an element.

Module and line are read from the Python frames while the operation runs. Nothing is installed in
the model, and code between modules, such as a residual sum, is located as exactly as code in one.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
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
_CHECKPOINT = os.path.join(_LIBRARIES[0], "utils", "checkpoint.py")
_ENGINE = "_engine_run_backward"
"""The torch function that enters the autograd engine. Frames below it run in backward; those above
only started it.
"""

# what torch.compile adds to names
_COMPILED = "_orig_mod"
_TEXT_MAX = 160


class Place(NamedTuple):
    """The dotted name of a module and a line of Python; empty if unknown."""

    module: str = ""
    source: str = ""

    def completed_by(self, other: Place) -> Place:
        """Return this place, with what is unknown from another."""
        return Place(self.module or other.module, self.source or other.source)


def plain_name(name: str) -> str:
    """Return a module's or tensor's name in a model that was not compiled."""
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


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
    source = ""
    fallback = ""
    recomputing = False
    nested = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        nested = code.co_name == _ENGINE
        if nested or file in _TRACER:
            break
        if not file.startswith(_HERE):
            if not source and not file.startswith(_LIBRARIES):
                source = _line(code, frame.f_lasti)
            # an operation of a library, if no user code asked for it
            if not fallback and not file.startswith(_DISPATCH):
                fallback = _line(code, frame.f_lasti)
            recomputing |= file == _CHECKPOINT
            if module is None:
                module = _module(frame, names)
        frame = frame.f_back
    user_code = bool(source)
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
        looped = names.get(id(values.get(variable)))
        if start <= line <= end and looped is not None:
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
        if isinstance(loop, ast.For | ast.AsyncFor):
            start = loop.body[0].lineno
            end = loop.body[-1].end_lineno or 0
            names = [node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
            loops += [(start, end, name) for name in names]
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
            self._read(batch)
        elif isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            for name, dimensions in (("inputs_embeds", 3), ("input_ids", 2)):
                value = batch.get(name)
                if isinstance(value, Tensor) and value.ndim == dimensions:
                    self.shape = (value.shape[0], value.shape[1])
        self.valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _read(self, batch: Batch) -> None:
        shape = batch.input_ids.shape
        if len(shape) == 2:
            self.shape = (shape[0], shape[1])
        self.rows = batch.valid_index.tolist()
        self.samples = batch.sample_ids
        # a malformed batch predicts at no known position
        if shape == batch.attention_mask.shape == batch.labels.shape == batch.position_ids.shape:
            self.scored = batch.scored_index.tolist()

    def without_padding(self, tensor: Tensor) -> Tensor:
        """Return the tensor with 0 at padding, for the first four shapes of `locate`."""
        shape = tuple(tensor.shape)
        if self.valid is None or shape in self.others or not shape:
            return tensor
        b, t = self.valid.shape
        heads = _heads(shape, b, t)
        if not heads:
            return tensor
        padded = ~self.valid.to(tensor.device)[:, None, :, None]
        of_heads = tensor.reshape(b, heads[0], t, -1)
        return of_heads.masked_fill(padded, 0.0).reshape(shape)

    def sample_of(self, row: int) -> str | None:
        return self.samples[row] if row < len(self.samples) else None

    def locate(self, shape: tuple[int, ...], index: tuple[int, ...]) -> Owner:
        """Return the owner of an element, as far as the shape tells.

        Known shapes: [B, T, ...], attention's [B, heads, T, ...] and [B * heads, T, ...], and
        flattened [B * T, ...]. If the batch gathers tokens: valid ones [N, ...], teacher's and
        student's stacked [2N, ...], and predicting positions [S, ...]. For [B, ...] only the row.
        """
        readings = self._readings(shape, index)
        row = _agreed(row for row, _ in readings)
        if row is None:
            return Owner()
        token = _agreed(token for _, token in readings)
        return Owner(row, token, self.sample_of(row))

    def _readings(
        self, shape: tuple[int, ...], index: tuple[int, ...]
    ) -> list[tuple[int, int | None]]:
        """Return the row and token of an element in each known shape that this may be."""
        if self.shape is None or not index or shape in self.others:
            return []
        b, t = self.shape
        first = index[0]
        readings: list[tuple[int, int | None]] = []
        for positions in (self.rows, self.rows * 2, self.scored):
            if len(positions) == shape[0]:
                readings.append(divmod(positions[first], t))
        place = 0
        for size, i in zip(shape, index, strict=True):
            place = place * size + i
        elements = math.prod(shape)
        for heads in _heads(shape, b, t):
            row = place * b // elements
            token = place * b * heads * t // elements % t
            readings.append((row, token))
        if not readings and shape[0] == b != t:
            readings.append((first, None))
        return readings


def _heads(shape: tuple[int, ...], b: int, t: int) -> list[int]:
    """Return the number of heads, 1 without heads, for each of the first four shapes of `locate`
    that this may be: all of them have the elements of [B, heads, T, ...] in order.
    """
    found = []
    if len(shape) == 4 and shape[::2] == (b, t):
        found.append(shape[1])
    if len(shape) == 3 and b and shape[0] % b == 0 and shape[1] == t:
        found.append(shape[0] // b)
    if shape[:2] == (b, t):
        found.append(1)
    if shape[0] == b * t:
        found.append(1)
    return found


def _agreed(readings: Iterable[int | None]) -> int | None:
    """Return the one number that all readings agree on."""
    found = {*readings}
    return found.pop() if len(found) == 1 else None
