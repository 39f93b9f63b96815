"""A student as a folder of its own: the same logits from transformers alone, for every form that an
adapter can have.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import MAKE, save_base
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from students import moved
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.utils import logging as transformers_logging
from updates import random_update

import npt
from npt.adapters.consolidate import apply_update
from npt.adapters.converted import adapter_parameters
from npt.adapters.files import export as exporting
from npt.adapters.files.adapter_files import CONFIG_NAME
from npt.adapters.files.export import CODE, CODE_FILES, write_export
from npt.base import shards
from npt.base.recipe import ENTRY
from npt.cli.main import main
from npt.packed import quantized_linears

IDS = torch.tensor([[1, 5, 9, 33, 7, 801, 12, 90], [1, 6, 2, 400, 8, 3, 77, 5]])
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Code of exported folders is copied below this folder, not into the user's cache, and
    forgotten afterwards.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules"))
        )
        patch.setattr(sys, "path", list(sys.path))
        before = set(sys.modules)
        transformers_logging.disable_progress_bar()
        yield
        transformers_logging.enable_progress_bar()
        for name in set(sys.modules) - before:
            if name.startswith("transformers_modules"):
                del sys.modules[name]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers, for what the embedded model is not needed for."""
    return save_base("llama", tmp_path_factory.mktemp("bases") / "llama")


def student(
    base: str | Path = "tiny",
    quantization: str | None = "nf4",
    loaded: dict[str, Any] | None = None,
    **form: Any,
) -> Any:
    """A base with an adapter that matters, and the base's tokenizer."""
    model, tokenizer = npt.load_base(
        str(base), quantization=quantization, device="cpu", **(loaded or {})
    )
    npt.attach(model, npt.NPTConfig(**{"rank": 3, **form}), seed=4)
    moved(model, 0.2)
    return model, tokenizer


def exported(model: Any, tokenizer: Any, folder: Path, **arguments: Any) -> Any:
    """Return the student by way of a folder, all keys of which must fit."""
    folder.mkdir(parents=True)
    write_export(model, tokenizer, folder)
    return loaded(folder, **arguments)


def loaded(folder: Path, **arguments: Any) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **arguments
    )
    assert not any(report.values()), report
    assert not model.training
    return model


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model(ids, attention_mask=mask).logits


def continued(model: Any, **arguments: Any) -> torch.Tensor:
    decoding: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 2,
        "eos_token_id": None,
    }
    return model.generate(IDS, attention_mask=LEFT, **decoding, **arguments)


def assert_same(found: Any, model: Any) -> None:
    """Bit for bit: the same operations on the same numbers, on one device."""
    assert torch.equal(logits(found), logits(model))
    valid = LEFT.bool()
    assert torch.equal(logits(found, mask=LEFT)[valid], logits(model, mask=LEFT)[valid])
    assert torch.equal(continued(found), continued(model))


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_an_exported_student_gives_the_students_logits_bit_for_bit(tmp_path, quantization):
    model, tokenizer = student(quantization=quantization)
    found = exported(model, tokenizer, tmp_path / "out")
    assert type(found).__name__ == "NPTLlamaForCausalLM" and len(quantized_linears(found)) == len(
        quantized_linears(model)
    )
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert {p.dtype for p in found.parameters() if p.dtype != torch.uint8} == {torch.float32}
    assert_same(found, model)
    if quantization:  # as the flag --base_precision, which is gone, advises
        assert_close(logits(found.dequantize()), logits(model))
        assert not quantized_linears(found)


@pytest.mark.parametrize("family", MAKE)
def test_every_family_is_exported_with_its_windows_and_untied_heads(tmp_path, family):
    model, tokenizer = student(
        save_base(family, tmp_path / "base"),
        quantization="nf4" if "window" in family else None,
        layers="1,3",
    )
    found = exported(model, tokenizer, tmp_path / "out")
    assert found.lm_head.weight is not found.model.embed_tokens.weight
    assert_same(found, model)


FORMS: dict[str, dict[str, Any]] = {
    "additive, down alone, in every layer": {
        "modulation": "additive",
        "targets": ("down",),
        "layers": "all",
    },
    "multiplicative, gate alone, unbounded": {
        "modulation": "multiplicative",
        "targets": ("gate",),
        "mult_form": "unbounded",
    },
    "kept residual, ranks by layer": {"residual": "keep", "layers": "0,1,3", "ranks": (1, 4, 2)},
    "half sigmoid": {"mult_form": "half_sigmoid"},
    "one plus tanh": {"mult_form": "one_plus_tanh"},
    "other scales": {"additive_scale": 1.3, "mult_bound": 0.9},
    "token part and threshold": {"rank": 8, "active": 3, "token_rank": 5},
    "threshold alone": {"rank": 8, "active": 3, "targets": ("stream",)},
    "token part alone": {"token_rank": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_adapter_is_exported(base, tmp_path, form):
    model, tokenizer = student(base, **FORMS[form])
    found = exported(model, tokenizer, tmp_path / "out")
    assert [name for name in found.state_dict() if ".npt." in name] == [
        name for name in model.state_dict() if ".npt." in name
    ]
    assert_same(found, model)


@pytest.mark.parametrize("form", ["half sigmoid", "token part and threshold"])
def test_consolidated_updates_are_exported(base, tmp_path, form):
    model, tokenizer = student(base, **FORMS[form])
    plain = logits(model)
    apply_update(model, random_update(model, layers=(2, 3)))
    apply_update(model, random_update(model, layers=(3,), seed=1))
    assert not torch.equal(logits(model), plain)
    assert_same(exported(model, tokenizer, tmp_path / "out"), model)


@pytest.mark.parametrize(
    "given",
    [
        {"quantization": "fp4"},
        {"quantization": "nf4", "loaded": {"compute_dtype": "bf16"}},
        {"quantization": "nf4", "loaded": {"double_quant": False}},
        {"quantization": None, "loaded": {"use_fp16": True}},
    ],
    ids=["fp4", "bf16 products", "scales once", "fp16"],
)
def test_what_the_base_computes_in_is_exported_with_it(base, tmp_path, given):
    model, tokenizer = student(base, **given)
    assert_same(found := exported(model, tokenizer, tmp_path / "out"), model)
    nested = [module.weight.quant_state.nested for _, module in quantized_linears(found)]
    assert all(nested) == ("double_quant" not in given.get("loaded", {}))


def test_weights_are_stored_in_16_bit_unless_that_rounds_them(base, tmp_path):
    model, tokenizer = student(base, quantization=None)
    with torch.no_grad():
        model.model.norm.weight.add_(1e-5)
    assert_same(exported(model, tokenizer, tmp_path / "out"), model)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as stored:
        kept = {name for name in stored.keys() if stored.get_slice(name).get_dtype() == "F32"}  # noqa: SIM118 - no mapping
    assert kept == {"model.norm.weight", *adapter_parameters(model)}


def test_the_adapter_stays_in_fp32_in_a_model_of_16_bit(base, tmp_path):
    model, tokenizer = student(base)
    found = exported(model, tokenizer, tmp_path / "out", dtype=torch.bfloat16)
    own = {name: p for name, p in found.named_parameters() if ".npt." in name}
    for name, parameter in adapter_parameters(model).items():
        assert torch.equal(own[name], parameter)
    assert found.model.embed_tokens.weight.dtype == found.model.norm.weight.dtype == torch.bfloat16
    assert logits(found).dtype == torch.bfloat16
    plain = exported(*student(base, quantization=None), tmp_path / "plain").to(torch.bfloat16)
    assert {p.dtype for name, p in plain.named_parameters() if ".npt." in name} == {torch.float32}
    assert torch.isfinite(logits(plain)).all()


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_what_was_loaded_is_saved_by_transformers_and_loads_again(base, tmp_path, quantization):
    model, tokenizer = student(base, quantization=quantization)
    found = exported(model, tokenizer, tmp_path / "out")
    torch.save(found, tmp_path / "pickled")  # its classes are found by name
    found.save_pretrained(tmp_path / "again")
    for file in CODE_FILES:
        assert (tmp_path / "again" / file).read_text() == (CODE / file).read_text()  # of a Llama
    again = loaded(tmp_path / "again")
    assert_same(again, model)
    assert all(
        torch.equal(a, b) for a, b in zip(found.parameters(), again.parameters(), strict=True)
    )


def test_weights_come_in_several_files_and_no_two_are_held_at_once(base, tmp_path, monkeypatch):
    model, tokenizer = student(base)
    limit, sizes = 30_000, []
    monkeypatch.setattr(shards, "SHARD_BYTES", limit)

    def counted(tensors: dict[str, torch.Tensor], *arguments: Any, **named: Any) -> None:
        sizes.append((len(tensors), sum(t.nbytes for t in tensors.values())))
        save_file(tensors, *arguments, **named)

    monkeypatch.setattr(shards, "save_file", counted)
    found = exported(model, tokenizer, tmp_path / "out")
    assert len(sizes) > 5 and all(size <= limit or count == 1 for count, size in sizes)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) == len(sizes)
    assert not list((tmp_path / "out").glob("*.part"))
    assert_same(found, model)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return npt.save_adapter(student()[0], tmp_path_factory.mktemp("adapters") / "some")


@pytest.fixture(scope="module")
def small(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the random Llama."""
    return npt.save_adapter(student(base)[0], tmp_path_factory.mktemp("adapters") / "small")


class TestCommand:
    def run(self, *arguments: object) -> int:
        return main(["export", *map(str, arguments)])

    def test_the_card_of_a_folder_runs_in_a_process_without_npt(self, adapter, tmp_path, capsys):
        out = tmp_path / "out"
        assert self.run("--adapter", adapter, "--output", out) == 0
        message = capsys.readouterr().out
        assert "4-bit base" in message and "(files: 1)" in message
        assert {p.stat().st_mode & 0o077 for p in out.iterdir()} == {0o666 & 0o077 & ~self.umask()}
        (snippet,) = re.findall(
            r"```python\n(.*?)```", (out / "README.md").read_text(), flags=re.DOTALL
        )
        done = subprocess.run(
            [sys.executable, "-P", "-c", "import sys; sys.modules['npt'] = None\n" + snippet],
            cwd=out,
            env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        model, tokenizer = npt.from_pretrained(adapter, device="cpu")
        ids = tokenizer("Once upon a time", return_tensors="pt")
        assert (
            done.stdout
            == tokenizer.decode(model.generate(**ids, max_new_tokens=20, do_sample=False)[0]) + "\n"
        )
        assert "NPTLlama" in (out / "config.json").read_text() and AutoTokenizer.from_pretrained(
            out, trust_remote_code=True
        )

    def umask(self) -> int:
        mask = os.umask(0)
        os.umask(mask)
        return mask

    def refused(self, capsys: Any, out: Path, *arguments: object, status: int = 2) -> str:
        """Expect one line, and nothing written."""
        before = sorted(out.parent.rglob("*"))
        assert self.run("--output", out, *arguments) == status
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "Traceback" not in message
        assert sorted(out.parent.rglob("*")) == before
        return message

    def test_what_cannot_be_exported_or_written(self, base, small, tmp_path, capsys):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").write_text("")
        old = tmp_path / "old"
        shutil.copytree(small, old)
        record = json.loads((old / CONFIG_NAME).read_text())
        (old / CONFIG_NAME).write_text(json.dumps({k: v for k, v in record.items() if k != ENTRY}))
        model, _ = student(base)
        apply_update(model, random_update(model, layers=(0, 3)))
        updated = npt.save_adapter(model, tmp_path / "updated")
        for adapter, output, status, words in (
            (updated, "out", 2, "has consolidated updates in layer 0, which is not converted"),
            (tmp_path / "none", "out", 5, "there is no folder"),
            (small, "full", 2, "exists and is not empty; choose another"),
            (small, "full/file", 2, "is a file: name a folder"),
            (old, "out", 5, "does not record how its base was loaded"),
        ):
            message = self.refused(capsys, tmp_path / output, "--adapter", adapter, status=status)
            assert words in message

    @pytest.mark.parametrize(
        ("where", "error"),
        [
            ("write_shards", SafetensorError("No space left on device")),
            ("write_json", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        ],
    )
    def test_the_disk_is_full(self, small, tmp_path, capsys, monkeypatch, where, error):
        def full(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(exporting, where, full)
        message = self.refused(capsys, tmp_path / "out", "--adapter", small)
        assert "and nothing was kept: " in message and "No space left on device" in message
