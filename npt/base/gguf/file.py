"""A GGUF file (llama.cpp's format): metadata and tensors, read with the package `gguf`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from npt.errors import ModelError, first_line, kind_of
from npt.extras import require

PLAIN = ("F32", "F16", "BF16")
"""Tensor types that are not quantised."""

_MOST_READS = 10_000_000
"""Several times the entries of the largest vocabularies, with two reads for each."""

_TOKENS = {"unk": "unknown", "pad": "padding"}


class GGUFFile:
    """An open GGUF file of a whole language model. A tensor is read when it is used.

    Attributes:
        path: of the file.
        tensors: tensors of `gguf` by name.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise ModelError(f"there is no file {str(path)!r}; pass a GGUF file")
        require("gguf", f"{path}, a GGUF file,")

        self.path = path
        try:
            self._reader = _bounded_reader()(path)
        except Exception as error:  # numpy and gguf raise many errors at the end of a file
            raise self.refusal(
                f"is damaged, not a GGUF file, or too new for this gguf"
                f" ({first_line(error)[:80]}); download it again or upgrade gguf"
            ) from error
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        # a LoRA, a projector of images and a vocabulary alone are GGUF files too
        kind = self.get("general.type", str, "model")
        parts = self.get("split.count", int, 1)
        if kind != "model" or not self.tensors or self._reader.byte_order != "I":
            raise self.refusal("is not a little-endian model with weights; pass another file")
        if parts > 1:
            raise self.refusal(
                f"is one of {parts} parts; join them with llama-gguf-split --merge and pass the"
                " result"
            )

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return an entry of the metadata, checked for its type, or the default."""
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise self.refusal(f"lacks the entry {key}; convert the model again")
            return default
        try:
            value = field.contents()
        except ValueError as error:
            raise self.refusal(f"has {key} that is not UTF-8; download it again") from error
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.refusal(f"has {kind_of(value)} in {key}, expected {kind.__name__}")
        return value

    @property
    def keys(self) -> Collection[str]:
        """Keys of the metadata."""
        return self._reader.fields.keys()

    def refusal(self, why: str) -> ModelError:
        """Return an error about this file."""
        return ModelError(f"{self.path} {why}")

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token by transformers' name: bos, eos, unk, pad, ..."""
        key = f"tokenizer.ggml.{_TOKENS.get(name, name)}_token_id"
        return self.get(key, int) if key in self.keys else None

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)

    @property
    def quantization(self) -> str:
        """The type of most of the file's numbers, such as Q4_K, or F16 if not quantised."""
        counts = Counter[str]()
        for tensor in self.tensors.values():
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        return counts.most_common(1)[0][0]


def _bounded_reader() -> Any:
    """Return gguf's reader, ending where the file does: its own goes on reading nothing, for as
    many entries as a damaged file claims.
    """
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise ValueError(f"it claims {end:,} bytes and has {len(self.data):,}")
            self.reads += 1
            if self.reads > _MOST_READS:
                raise ValueError(f"its metadata have more than {_MOST_READS:,} entries")
            return super()._get(offset, dtype, count, *rest, **named)

    return BoundedReader
