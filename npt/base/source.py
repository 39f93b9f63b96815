"""Where a base is, its configuration and its tokenizer: what can be read of it without loading
transformers' model classes and bitsandbytes, which take longer to import than a dataset to check.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from npt.base.families import SIZES, check_entries, check_family, check_shape
from npt.errors import ModelError, first_line
from npt.extras import install_command
from npt.stored import RESTORE

EMBEDDED = "tiny"
EMBEDDED_FOLDER = Path(__file__).resolve().parent.parent / "demo" / "tiny"

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Otherwise transformers asks on stdin whether to run a checkpoint's code."""


def read_config(name: str, *, whole: bool = True) -> Any:
    """Return the configuration of a base model; raise ModelError for an unsupported family.

    Unless it must be `whole`, it may be the bare entries of the file: transformers' class of the
    family, which knows what they leave out, imports torch's compiler.
    """
    source = find_base(name)
    if not isinstance(source, str):
        from npt.base.gguf.configuration import configuration_of

        return configuration_of(source)
    with reading("configuration", name):
        entries, _ = PreTrainedConfig.get_config_dict(source)
        check_entries(name, entries)
        if whole or not entries.keys() >= SIZES:
            config = AutoConfig.from_pretrained(source, **NO_CODE)
        else:
            config = SimpleNamespace(**entries)
        check_family(name, config)
        files = Path(source).glob("*.safetensors")
        check_shape(name, config, stored=sum(file.stat().st_size for file in files))
    return config


def load_tokenizer(name: str = EMBEDDED) -> Any:
    """Return the tokenizer of a base model."""
    source = find_base(name)
    if not isinstance(source, str):
        from npt.base.gguf.tokenizer import tokenizer_of

        return tokenizer_of(source)
    config = None
    with reading("tokenizer", name):
        # then AutoTokenizer needs the family's name, but not its class (see `read_config`)
        if "tokenizer_class" in get_tokenizer_config(source):
            entries, _ = PreTrainedConfig.get_config_dict(source)
            config = PreTrainedConfig(name_or_path=source, model_type=entries["model_type"])
        return AutoTokenizer.from_pretrained(source, config=config, **NO_CODE)


def find_base(name: str) -> Any:
    """Return the folder or hub id for transformers, or the opened GGUF file."""
    if name == EMBEDDED:
        if not EMBEDDED_FOLDER.is_dir():
            raise ModelError(
                "the embedded model 'tiny' is not part of an installed package: run"
                f" {install_command('distill', editable=True)}, or name another --model_name"
            )
        return str(EMBEDDED_FOLDER)
    if not name.strip():
        raise ModelError("the model's name is empty: pass --model_name tiny, a folder or a Hub id")
    path = Path(name).expanduser()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    pipes = [file for file in files if file.is_fifo()]
    if pipes:  # transformers would wait for it
        raise ModelError(f"{pipes[0]} is a pipe, not a file: {RESTORE}")
    if (path / "config.json").is_file():
        return str(path)
    # a folder without a configuration may hold a GGUF file, as downloads do
    files = [file for file in files if is_gguf(file)]
    if len(files) > 1:
        raise ModelError(
            f"{name} holds {len(files)} GGUF files, among them {files[0].name} and {files[1].name}:"
            " pass one of the files"
        )
    if files:
        from npt.base.gguf.file import GGUFFile

        return GGUFFile(files[0])
    if path.exists():
        raise ModelError(
            f"{name} has no config.json: pass a folder with a saved model, or a GGUF file"
        )
    # anything else may be a Hub id
    if path.is_absolute() or name.startswith((".", "~")):
        raise ModelError(
            f"there is no model folder {name!r}: check --model_name ('tiny' is the embedded model)"
        )
    return name


def is_gguf(file: Path) -> bool:
    """Return whether a file is GGUF by its suffix or first bytes: Ollama's have no suffix."""
    if file.suffix.lower() == ".gguf":
        return True
    with suppress(OSError):
        if file.is_file():
            with file.open("rb") as stream:
                return stream.read(4) == b"GGUF"
    return False


@contextmanager
def reading(what: str, name: str) -> Iterator[None]:
    """Turn any error from the files of a base into a ModelError of one line."""
    try:
        yield
    except (torch.OutOfMemoryError, ModelError):
        raise
    # several libraries read the files, each with its own error classes
    except Exception as error:
        remedy = (
            "pass 'tiny', a local folder with safetensors, or a Hub id (check the network, and the"
            " login for gated models)"
        )
        raise ModelError(
            f"cannot load the {what} of {name!r} ({first_line(error)[:300]}): {remedy}"
        ) from error
