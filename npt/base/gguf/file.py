"""A GGUF file, llama.cpp's format: metadata and tensors, read by the package `gguf`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from npt.errors import ModelError, first_line, kind_of
from npt.extras import require

MAGIC = b"GGUF"
SUFFIX = ".gguf"

PLAIN = ("F32", "F16", "BF16")
"""Types of numbers that are not quantised."""


def find_gguf(name: str) -> Path | None:
    """Return the GGUF file that a model's name means: a file, or the only one in a folder that
    holds no config.json; None if it means something else.

    Raises:
        ModelError: several such files in the folder, or there is no such file.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            raise ModelError(
                f"{name} holds {len(files)} GGUF files, {files[0].name} and {files[1].name} among"
                " them; name one of them"
            )
        return files[0] if files else None
    if path.is_file():
        with path.open("rb") as stream:
            return path if path.suffix == SUFFIX or stream.read(len(MAGIC)) == MAGIC else None
    if path.suffix == SUFFIX:
        raise ModelError(f"there is no file {name!r}; check --model_name")
    return None


class GGUFFile:
    """An open GGUF file. Nothing of a tensor is read until it is used.

    Raises ModelError if it is no whole language model, ConfigError if `gguf` is not installed.

    Attributes:
        path: of the file.
        tensors: the reader's, by name.
    """

    def __init__(self, path: Path):
        require("gguf", f"{path}, a GGUF file,")
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # numpy and the reader meet the end of a file in many ways
            raise self.refusal(
                f"is no GGUF file, or damaged, or newer than this version of gguf"
                f" ({first_line(error)[:80]}); fetch it again"
            ) from error
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in self._reader.tensors}
        kind, parts = self.get("general.type", str, "model"), self.get("split.count", int, 1)
        if kind != "model" or not self.tensors or self._reader.byte_order != "I":
            raise self.refusal("holds no model with weights for this machine; name another file")
        if parts > 1:
            raise self.refusal(
                f"is one of {parts} parts; join them with llama-gguf-split --merge, and name the"
                " whole"
            )

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return an entry of the metadata; ModelError if it is of another kind, or missing and
        without a default.
        """
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                raise self.refusal(f"lacks the entry {key}; convert the model anew")
            return default
        value = field.contents()
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
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
        """The type of most of the file's numbers, such as Q4_K; F16 if it was not quantised."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        return counts.most_common(1)[0][0]
