"""Where an operation stands: the module that it belongs to, the source line that ran it, the token that an element is of.

Read off the Python frames at the moment of the operation. Nothing is installed in the model for it, and code between modules,
such as a residual sum in a layer's own forward, is attributed as exactly as code inside one.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn

from npt.data.batch import Batch

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OBSERVERS = tuple(_HERE + name for name in ("operations.py", "trace.py", "place.py"))
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (torch, bitsandbytes))
_ENGINE = "_engine_run_backward"
"""The function of torch that enters the autograd engine: frames below it run in backward, those above only started it."""

_LOCALS = ("self", "module", "layer", "_module")
"""Names under which a frame holds the module that it works for; the first that is a module of the model counts."""

_TEXT_MAX = 160


@dataclass(frozen=True)
class Place:
    """A line of Python and the module that it worked for. module: dotted name, empty where no frame names one."""

    module: str = ""
    source: str = ""

    @property
    def layer(self) -> int | None:
        return layer_of(self.module)


def layer_of(name: str) -> int | None:
    """The index of the decoder layer in a dotted name: the first whole number in it."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def module_names(model: nn.Module) -> dict[int, str]:
    """Dotted names by identity, for `place_of`."""
    return {id(module): name for name, module in model.named_modules()}


def place_of(frame: FrameType | None, names: Mapping[int, str]) -> Place:
    """The place of whatever runs in `frame`: walks outwards to the first line that is not a library's, and to the first module.

    In backward the walk ends where the engine was entered: what started it tells nothing about what runs.

    Args:
        frame: the innermost frame to look at.
        names: of `module_names`.
    """
    module: str | None = None
    source = fallback = ""
    while frame is not None and frame.f_code.co_name != _ENGINE and (module is None or not source):
        code = frame.f_code
        observer = code.co_filename.startswith(_OBSERVERS)
        if not observer and not source:
            if code.co_filename.startswith(_LIBRARIES):
                fallback = fallback or _line(frame)
            else:
                source = _line(frame)
        if module is None and not observer:
            module = next((names[id(value)] for value in map(frame.f_locals.get, _LOCALS) if id(value) in names), None)
        frame = frame.f_back
    return Place(module or "", source or fallback)


def backward_frame(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether Python code runs inside of backward in front of `frame`, and whether it is a checkpoint's recomputation.

    Inside of backward there is Python only in hooks, in custom autograd functions and in recomputation. Everything else that
    backward does has no line of its own: its place is that of the forward operation.
    """
    own = recomputing = False
    while frame is not None and frame.f_code.co_name != _ENGINE:
        file = frame.f_code.co_filename
        own |= not file.startswith(_LIBRARIES) and not file.startswith(_OBSERVERS)
        recomputing |= file.endswith(os.path.join("torch", "utils", "checkpoint.py"))
        frame = frame.f_back
    return own and frame is not None, recomputing and frame is not None


def _line(frame: FrameType) -> str:
    """`file.py:12 in function: expression`, the expression as exactly as the interpreter knows it."""
    code, line = frame.f_code, frame.f_lineno
    text = _expression(code, frame.f_lasti) or linecache.getline(code.co_filename, line)
    text = " ".join(text.split())
    text = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_qualname}: {text}"


def _expression(code: CodeType, instruction: int) -> str:
    """The source text of one instruction; empty where the interpreter kept no columns for it."""
    positions = list(code.co_positions())
    if not 0 <= instruction // 2 < len(positions):
        return ""
    line, end_line, column, end_column = positions[instruction // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return ""
    lines = [linecache.getline(code.co_filename, number) for number in range(line, end_line + 1)]
    if not all(lines):
        return ""
    # Columns are counted in bytes of UTF-8.
    pieces = [text.encode() for text in lines]
    pieces[-1] = pieces[-1][:end_column]
    pieces[0] = pieces[0][column:]
    return b" ".join(pieces).decode(errors="replace")


class Tokens:
    """Tells which token of which sample an element of a tensor belongs to, from the tensor's shape.

    Args:
        batch: what the pass was run on; None knows nothing.
    """

    def __init__(self, batch: Any = None):
        self.shape: tuple[int, int] | None = None
        self.rows: list[int] = []
        self.samples: tuple[str, ...] = ()
        if isinstance(batch, Batch):
            self.shape = (batch.input_ids.shape[0], batch.input_ids.shape[1]) if batch.input_ids.ndim == 2 else None
            self.rows, self.samples = batch.valid_index.tolist(), batch.sample_ids
        elif isinstance(batch, Mapping):
            for name, states in (("input_ids", 2), ("inputs_embeds", 3)):
                value = batch.get(name)
                if isinstance(value, Tensor) and value.ndim == states:
                    self.shape = (value.shape[0], value.shape[1])
                    break

    def locate(self, shape: tuple[int, ...], index: tuple[int, ...]) -> tuple[int | None, int | None, str | None]:
        """(row, token, sample) of the element at `index` of a tensor of `shape`; None what the shape does not tell.

        Known are [B, T, ...], attention's [B, heads, T, ...], flattened [B * T, ...] and, of a batch that gathers them, the
        valid tokens' rows [N, ...] or teacher's and student's rows stacked [2N, ...].
        """
        if self.shape is None or not index:
            return None, None, None
        b, t = self.shape
        row: int | None = None
        token: int | None = None
        n = len(self.rows)
        if len(shape) >= 2 and shape[:2] == (b, t):
            row, token = index[0], index[1]
        elif len(shape) == 4 and shape[0] == b and shape[2] == t:
            row, token = index[0], index[2]
        elif n and shape[0] in (n, 2 * n):
            row, token = divmod(self.rows[index[0] % n], t)
        elif shape[0] == b * t:
            row, token = divmod(index[0], t)
        elif shape[0] == b:
            row = index[0]
        sample = self.samples[row] if row is not None and row < len(self.samples) else None
        return row, token, sample
