"""A GGUF file, llama.cpp's format: metadata and tensors, read by the package `gguf`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from npt.errors import ModelError, first_line, kind_of
from npt.extras import require
from npt.stored import shown

MAGIC = b"GGUF"
SUFFIX = ".gguf"

PLAIN = ("F32", "F16", "BF16")
"""Types of numbers that are not quantised."""


_MOST_READS = 10_000_000
"""Several times the entries of the largest vocabularies, two reads for each."""


def _bounded_reader() -> Any:
    """Return a reader that ends where its file does. Its own reads nothing there, at any length
    that a damaged file claims.
    """
    from gguf import GGUFReader

    class Reader(GGUFReader):
        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it claims {end:,} bytes and more")
            self.reads += 1
            if self.reads > _MOST_READS:
                raise ValueError(f"its metadata have more than {_MOST_READS:,} entries")
            return super()._get(offset, dtype, count, *rest, **named)

    return Reader


class GGUFFile:
    """An open GGUF file.

    path: of the file. tensors: the reader's, by name. Nothing of a tensor is read until it is used.

    Raises ModelError if it is no GGUF file or damaged, or part of one or no language model;
    ConfigError if `gguf` is not installed.
    """

    def __init__(self, path: Path):
        require("gguf", f"{path}, a GGUF file,")

        self.path = path
        try:
            with path.open("rb") as stream:
                start = stream.read(len(MAGIC))
            if start != MAGIC:
                raise ModelError(
                    f"{path} is no GGUF file: it begins with {start!r}, not with {MAGIC!r}; fetch"
                    " it again"
                )
            self._reader = _bounded_reader()(path)
        except (ModelError, MemoryError):
            raise
        # numpy and the reader meet the end of a file in many ways
        except Exception as error:
            raise ModelError(
                f"{path} is damaged, cut short at {path.stat().st_size:,} bytes, or newer than this"
                f" version of gguf ({first_line(error)[:80]}); fetch it again"
            ) from error
        if self._reader.byte_order != "I":
            raise self.refusal("is written for machines of another byte order; convert it for this")
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_kind()

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return an entry of the metadata; ModelError if it is of another kind, or missing and
        without a default.
        """
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise self.refusal(f"lacks the entry {key}; convert the model anew")
            return default
        try:
            value = field.contents()
        except (ValueError, IndexError) as error:
            raise self.refusal(f"has an unreadable entry {key}: {first_line(error)}") from error
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refusal(f"has {kind_of(value)} in {key}, expected {kind.__name__}")
        return value

    def has(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def keys(self, prefix: str) -> list[str]:
        """Return the rest of every key of the metadata that begins with `prefix`."""
        return [key.removeprefix(prefix) for key in self._reader.fields if key.startswith(prefix)]

    def refusal(self, why: str) -> ModelError:
        """Return an error about this file."""
        return ModelError(f"{self.path} {why}")

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)

    @property
    def quantization(self) -> str:
        """The type that the file was quantised to, such as Q4_K_M, or F16 if it was not; if it does
        not say, the type of most of its numbers.
        """
        from gguf import LlamaFileType

        try:
            name = LlamaFileType(self.get("general.file_type", int, -1)).name
            return name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:
            counts: Counter[str] = Counter()
            for tensor in self.tensors.values():
                counts[tensor.tensor_type.name] += int(tensor.n_elements)
            return counts.most_common(1)[0][0]

    def _check_kind(self) -> None:
        """Refuse what is not a whole language model."""
        kind = self.get("general.type", str, "model")
        if kind != "model":
            raise self.refusal(f"holds {shown(kind)}, not a model; name the model's own file")
        parts = self.get("split.count", int, 1)
        if parts > 1:
            raise self.refusal(
                f"is one of {parts} parts; join them with llama-gguf-split --merge, and name the"
                " whole"
            )
        if not self.tensors:
            raise self.refusal("holds a vocabulary and no weights; name the model's own file")
