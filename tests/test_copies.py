"""The copies of a base that tests are given in place of loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from copies import Loads, copied

from npt.base import load as loading
from npt.base.identity import base_identity


def described(model: Any) -> list:
    """All that a model is made of but its numbers, and which of its parts are one object."""
    numbers: dict[int, int] = {}

    def one(thing: object) -> int:
        return numbers.setdefault(id(thing), len(numbers))

    parts: list = [model.config.to_dict(), sorted(vars(model))]
    for key, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        known = (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
        parts.append((key, type(tensor), known, sorted(vars(tensor)), one(tensor)))
    for key, module in model.named_modules():
        parts.append((key, type(module), module.training, sorted(vars(module))))
        if isinstance(module, Linear4bit):
            state = module.weight.quant_state
            parts.append(
                (
                    sorted(vars(module.weight)),
                    module.weight.module is module,
                    one(state),
                    one(module.quant_state),
                )
            )
            parts.append(
                (
                    one(state.state2.code),
                    sorted(vars(state)),
                    state.dtype,
                    state.shape,
                    state.quant_type,
                )
            )
    return parts


def tensors(model: Any) -> list[torch.Tensor]:
    found = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if isinstance(module, Linear4bit):
            state = module.weight.quant_state
            found += [
                state.absmax,
                state.code,
                state.offset,
                state.state2.absmax,
                state.state2.code,
            ]
    return found


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("name", ["tiny", "random"])
def test_is_what_another_load_would_be(
    name: str, quantization: str | None, llama_folder: Path, load_model: Any
) -> None:
    name = str(llama_folder) if name == "random" else name
    how: dict = {"dtype": "auto"}
    if quantization:
        how["quantization_config"] = loading.packing_config(quantization)
    first, second = (loading._read_weights(name, "cpu", "sdpa", **how) for _ in range(2))
    copy = copied(first)
    assert described(copy) == described(second)
    assert all(map(torch.equal, tensors(copy), tensors(second)))
    assert not {t.data_ptr() for t in tensors(copy)} & {t.data_ptr() for t in tensors(first)}
    assert base_identity(copy) == base_identity(second)


def test_a_file_that_changes_is_read_again(llama_folder: Path, tmp_path: Path) -> None:
    read: list[str] = []

    def load(name: str, device: str, attention: str, **how: Any) -> Any:
        read.append(name)
        return torch.nn.Linear(2, 2)

    loads = Loads(load)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    for _ in range(2):
        loads(str(tmp_path), "cpu", "sdpa")
    (tmp_path / "model.safetensors").write_bytes(b"23")
    loads(str(tmp_path), "cpu", "sdpa")
    loads(str(tmp_path), "cpu", "sdpa", dtype="auto")
    assert len(read) == 3
