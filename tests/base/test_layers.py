"""Layers that are read one at a time are those of a base that is loaded as a whole, to the last
bit, and what is wrong with their files is refused in the same words.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from families import MAKE, save_base
from gguf_files import made_model, write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import npt
from npt.adapters.converted import adapter_parameters
from npt.base.layers import real_layers
from npt.base.precision import audit_precision, policy_dtype
from npt.base.source import EMBEDDED_FOLDER, read_config
from npt.doctor.shape import Shape, llama_config
from npt.errors import ModelError

CPU = torch.device("cpu")
WEIGHT = "model.layers.2.mlp.up_proj.weight"


def tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Everything that a model's results depend on, adapters not: numbers, and how they are used."""
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if ".npt." not in name:
            yield name, (type(tensor), tensor.dtype, tensor.requires_grad, tensor.detach())
    for name, module in model.named_modules():
        yield name, (type(module), module.training, sorted(module._modules))
        if isinstance(module, Linear4bit):
            weight, state = module.weight, module.weight.quant_state
            assert weight.module is module and module.quant_state is state
            yield name, (weight.quant_type, weight.blocksize, weight.compress_statistics)
            yield name, (weight.bnb_quantized, weight.quant_storage, module.compute_dtype)
            yield name, (module.compute_type_is_set, module.support_avx512bf16_for_cpu)
            yield name, (state.dtype, state.shape, state.quant_type, state.blocksize, state.nested)
            yield name, (state.absmax, state.code, state.offset)
            if state.nested:
                yield name, (state.state2.absmax, state.state2.code, state.state2.blocksize)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return bool(one == other)


def assert_same(one: Any, other: Any) -> None:
    for (name, values), (other_name, others) in zip(tensors(one), tensors(other), strict=True):
        assert name == other_name
        assert all(map(same, values, others)), (name, values, others)


def compare(name: str, **arguments: Any) -> tuple[Any, Any]:
    """Load a base as a whole and layer by layer, with adapters, compare them and return them."""
    whole, _ = npt.load_base(name, device="cpu", **arguments)
    later, _ = npt.load_base(name, device="cpu", layers_later=True, **arguments)
    assert [layer.mlp.up_proj.weight.is_meta for layer in later.model.layers] == [
        index > 0 for index in range(len(later.model.layers))
    ]
    reports = [npt.attach(model, npt.NPTConfig(rank=4, layers="all")) for model in (whole, later)]
    assert reports[0] == reports[1]
    order = [index for index, _ in real_layers(later, CPU)]
    assert sorted(order) == list(range(len(whole.model.layers)))
    kept = npt.base_identity(later)
    assert kept == npt.base_identity(whole)
    assert_same(later, whole)
    for key, parameter in adapter_parameters(later).items():
        assert torch.equal(parameter, adapter_parameters(whole)[key])
    audits = [audit_precision(model, policy_dtype(model)) for model in (later, whole)]
    assert audits[0] == audits[1]
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(later(ids).logits, whole(ids).logits)
    return later, whole


@pytest.mark.parametrize(
    "arguments",
    [
        {"quantization": "nf4"},
        {"quantization": "fp4", "double_quant": False},
        {"quantization": "nf4", "compute_dtype": "bf16"},
        {"quantization": "nf4", "dtype": "fp32", "attn_implementation": "eager"},
        {},
        {"dtype": "bf16"},
        {"use_fp16": True},
    ],
    ids=str,
)
def test_layers_are_those_of_the_whole_base(llama_folder, load_model, arguments) -> None:
    compare(str(llama_folder), **arguments)


@pytest.mark.parametrize("family", MAKE)
def test_layers_of_every_family(family, tmp_path) -> None:
    compare(str(save_base(family, tmp_path / "base")), quantization="nf4")


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_a_tied_head_stays_tied(quantization) -> None:
    later, _ = compare("tiny", quantization=quantization)
    assert later.lm_head.weight is later.model.embed_tokens.weight


def test_more_layers_than_ten_are_hashed_in_the_order_of_their_names(tmp_path) -> None:
    model = made_model(num_hidden_layers=12)
    model.save_pretrained(tmp_path)
    with_tokenizer(tmp_path)
    later, _ = npt.load_base(str(tmp_path), device="cpu", layers_later=True)
    assert [index for index, _ in real_layers(later, CPU)][:4] == [0, 1, 10, 11]
    compare(str(tmp_path))


def with_tokenizer(folder: Path) -> str:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / file, folder / file)
    return str(folder)


def saved_in_parts(load_model: Any, folder: Path) -> str:
    load_model(None).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return with_tokenizer(folder)


def saved_packed(load_model: Any, folder: Path) -> str:
    load_model("fp4").save_pretrained(folder)
    return with_tokenizer(folder)


def saved_without_prefix(load_model: Any, folder: Path) -> str:
    model = load_model(None)
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    stored = {k.removeprefix("model."): t for k, t in stored.items() if k != "lm_head.weight"}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return with_tokenizer(folder)


@pytest.mark.parametrize("save", [saved_in_parts, saved_packed, saved_without_prefix])
def test_layers_of_checkpoints_in_other_forms(load_model, tmp_path, save) -> None:
    name = save(load_model, tmp_path)
    compare(name, quantization="fp4" if save is saved_packed else "nf4")


def test_a_gguf_file_is_unpacked_once_and_kept_until_the_last_layer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = str(write_gguf(tmp_path / "a.gguf", made_model()))
    compare(name, quantization="nf4")
    assert not list(tmp_path.glob("npt-gguf-*"))
    model, _ = npt.load_base(name, device="cpu", layers_later=True)
    assert len(list(tmp_path.glob("npt-gguf-*"))) == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del model
        gc.collect()
    assert not [one for one in caught if one.category is ResourceWarning]
    assert not list(tmp_path.glob("npt-gguf-*"))


def test_layers_of_a_model_of_the_hub(llama_folder, load_model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    shutil.copytree(llama_folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    compare("some/model", quantization="nf4")


MEASURE = """
import sys, torch, npt
from npt.base.layers import real_layers

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

arguments = {"quantization": "nf4", "dtype": "bf16", "device": "cpu"}
npt.load_base("tiny", **arguments)
before = peak()
model, _ = npt.load_base(sys.argv[1], layers_later=True, **arguments)
for _, layer in real_layers(model, torch.device("cpu")):
    for module in layer.modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, None)
        vars(module).pop("quant_state", None)
print(peak() - before)
model, _ = npt.load_base(sys.argv[1], **arguments)
npt.base_hash(model)
print(peak() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A base whose layers, of 17 MB in bf16, take nearly all of it."""
    folder = tmp_path_factory.mktemp("large")
    config = llama_config(Shape(8, 768, 3072, 12, 4, 64, 512, tied=True))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")
    with_tokenizer(folder)
    return folder


def test_a_process_holds_less_than_two_layers(large) -> None:
    shape = Shape.of(read_config(str(large)))
    limit = 2 * shape.head_weights + 2 * 2 * shape.layer_weights
    # on the CPU bitsandbytes packs a weight by way of four copies in 32 bit
    limit += 4 * 4 * shape.hidden * shape.ffn
    # freed memory is given back at once, however small
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, str(large)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    later, whole = map(int, done.stdout.split())
    assert later < limit < whole


class TestRefused:
    @pytest.fixture
    def folder(self, llama_folder, load_model, tmp_path) -> Path:
        return Path(shutil.copytree(llama_folder, tmp_path / "model"))

    def change(self, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})

    @pytest.mark.parametrize("quantization", ["nf4", None])
    @pytest.mark.parametrize(
        "change",
        [
            lambda stored: stored.pop(WEIGHT),
            lambda stored: stored.pop("model.norm.weight"),
            lambda stored: stored.update({WEIGHT: torch.zeros(3, 64, dtype=torch.bfloat16)}),
        ],
        ids=["a layer's weight", "a norm", "a shape"],
    )
    def test_at_once_in_the_words_of_the_whole_base(self, folder, quantization, change) -> None:
        self.change(folder, change)
        messages = []
        for later in (False, True):
            with pytest.raises(ModelError) as refusal:
                npt.load_base(
                    str(folder), quantization=quantization, device="cpu", layers_later=later
                )
            messages.append(str(refusal.value))
        assert messages[0] == messages[1] and "\n" not in messages[0]

    def test_files_of_which_one_is_damaged(self, folder) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        with pytest.raises(ModelError, match=r"^cannot load the weights of .*local folder with"):
            npt.load_base(str(folder), device="cpu", layers_later=True)

    def test_another_code_than_is_stored(self, load_model, tmp_path) -> None:
        name = saved_packed(load_model, tmp_path)
        with pytest.raises(ModelError, match="is stored as fp4, not nf4"):
            npt.load_base(name, quantization="nf4", device="cpu", layers_later=True)
        config = json.loads((tmp_path / "config.json").read_text())
        config["quantization_config"]["bnb_4bit_quant_type"] = "nf4"
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match="is stored as fp4 in layer 0, but nf4 by its config"):
            npt.load_base(name, quantization="nf4", device="cpu", layers_later=True)

    def test_a_stored_packed_layer_when_it_is_read(self, load_model, tmp_path) -> None:
        name = saved_packed(load_model, tmp_path)
        q_proj, k_proj = (
            f"model.layers.2.self_attn.{part}.weight" for part in ("q_proj", "k_proj")
        )

        def narrow(stored: dict[str, torch.Tensor]) -> None:
            narrower = {k: t.clone() for k, t in stored.items() if k.startswith(k_proj)}
            stored.update({k.replace(k_proj, q_proj): t for k, t in narrower.items()})

        def cut(stored: dict[str, torch.Tensor], name: str) -> None:
            stored[name] = stored[name][:10].clone()

        for change, message in (
            (partial(cut, name=q_proj), rf"{q_proj}'s 4-bit codes in shape \(20,\), not \(4096,\)"),
            (
                partial(cut, name=f"{q_proj}.absmax"),
                rf"{q_proj}.absmax in shape \(10,\), not \(64,\)",
            ),
            (narrow, rf"has the weight {q_proj} in shape \(32, 64\), not \(64, 64\)"),
            (lambda stored: stored.pop(f"{q_proj}.absmax"), "cannot load the weights of .*absmax"),
        ):
            whole = (tmp_path / "model.safetensors").read_bytes()
            self.change(tmp_path, change)
            later, _ = npt.load_base(name, device="cpu", layers_later=True)
            with pytest.raises(ModelError, match=message) as refusal:
                for _ in real_layers(later, CPU):
                    pass
            assert "\n" not in str(refusal.value)
            (tmp_path / "model.safetensors").write_bytes(whole)

    def test_a_hash_and_a_training_of_layers_that_are_still_in_their_files(self) -> None:
        later, tokenizer = npt.load_base("tiny", device="cpu", layers_later=True)
        npt.attach(later)
        for use in (npt.base_hash, lambda model: npt.Trainer(model, tokenizer, [{"text": "a"}])):
            with pytest.raises(ModelError, match="layers of the base are still in their files"):
                use(later)
