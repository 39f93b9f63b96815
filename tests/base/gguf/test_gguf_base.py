"""GGUF files as bases: the numbers, the configuration, and what is loaded from them as usual."""

import json

import numpy as np
import pytest
import torch
from gguf_files import Type, made_model, write_gguf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import npt
from npt.base.gguf.configuration import configuration_of, describe_origin
from npt.base.gguf.file import GGUFFile
from npt.base.precision import quantization_of
from npt.base.source import load_tokenizer, read_config

IDS = torch.arange(3, 43)[None]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "smollm3"])
def test_every_family_computes_what_was_written(family, tmp_path) -> None:
    model = made_model(family, num_hidden_layers=4)  # SmolLM3 leaves its fourth unrotated
    base, _ = npt.load_base(str(write_gguf(tmp_path / "a.gguf", model, Type.F32)))
    # fp16 rounds a weight by up to 2^-11 of it, logits here are below 2
    torch.testing.assert_close(logits(base), logits(model), rtol=0, atol=2e-3)
    assert base.config.model_type == family and not hasattr(base.config, "quantization_config")


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_of_its_own_stays_one_and_a_tied_one_tied(tied, tmp_path) -> None:
    model = made_model(tie_word_embeddings=tied)
    base, _ = npt.load_base(str(write_gguf(tmp_path / "a.gguf", model)))
    torch.testing.assert_close(logits(base), logits(model), rtol=0, atol=2e-3)
    same = base.lm_head.weight.data_ptr() == base.model.embed_tokens.weight.data_ptr()
    assert same == tied


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0])
def test_quantised_numbers_are_those_of_the_file(kind, tmp_path) -> None:
    import gguf

    model = made_model()
    own = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    wanted = gguf.dequantize(gguf.quantize(own, kind), kind)
    done = npt.import_base(write_gguf(tmp_path / "a.gguf", model, kind), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    found = stored["model.layers.1.mlp.down_proj.weight"]
    assert found.dtype == torch.float16 and torch.equal(found, torch.from_numpy(wanted).half())
    assert np.abs(wanted - own).max() > 0  # it was quantised
    assert (done.quantization, done.quantized, done.dtype) == (kind.name, True, "fp16")
    assert done.parameters == sum(p.numel() for p in model.parameters())


def test_a_folder_loads_with_transformers_alone(tmp_path) -> None:
    model = made_model()
    npt.import_base(write_gguf(tmp_path / "a.gguf", model), tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(read), logits(model), rtol=0, atol=2e-3)
    assert read.config.architectures == ["LlamaForCausalLM"]
    assert read.generation_config.eos_token_id == 1


def test_large_and_tiny_numbers_are_kept_in_bf16(tmp_path) -> None:
    for number, scale in enumerate((1e6, 1e-9)):
        model = made_model()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(scale)
        file = write_gguf(tmp_path / f"{number}.gguf", model, Type.BF16)
        done = npt.import_base(file, tmp_path / str(number))
        assert done.dtype == "bf16"
        assert read_config(str(tmp_path / str(number))).dtype == torch.bfloat16


def test_nf4_a_teacher_and_an_adapter_work_on_it(tmp_path) -> None:
    file = str(write_gguf(tmp_path / "a.gguf", kind=Type.Q8_0))
    base, _ = npt.load_base(file, quantization="nf4")
    assert quantization_of(base) == "nf4"
    assert npt.load_teacher(file).config.npt_origin["quantization"] == "Q8_0"
    npt.attach(base, npt.NPTConfig(layers=(1,), rank=2, init="random"))
    npt.save_adapter(base, tmp_path / "adapter")
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == file
    student, _ = npt.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(student), logits(base))


def test_the_same_file_is_the_same_base_wherever_it_lies(tmp_path) -> None:
    model = made_model()
    first, _ = npt.load_base(str(write_gguf(tmp_path / "a.gguf", model)))
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "b.gguf", model)
    second, _ = npt.load_base(str(tmp_path / "folder"))
    npt.import_base(tmp_path / "a.gguf", tmp_path / "imported")
    third, _ = npt.load_base(str(tmp_path / "imported"))
    assert npt.base_hash(first) == npt.base_hash(second) == npt.base_hash(third)


def test_a_plan_reads_no_weights_and_a_load_leaves_no_folder(tmp_path, monkeypatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    file = str(write_gguf(tmp_path / "a.gguf"))
    base, tokenizer = npt.load_base(file)
    assert not list(scratch.iterdir())
    monkeypatch.setattr(
        "npt.base.gguf.convert.convert", lambda *_: pytest.fail("weights were read")
    )
    config = read_config(file)
    skipped = {"npt_origin", "_name_or_path", "transformers_version", "dtype"}
    assert {k: v for k, v in config.to_dict().items() if k not in skipped} == {
        k: v for k, v in base.config.to_dict().items() if k not in skipped
    }
    assert config.npt_origin == base.config.npt_origin
    text = "Some words,  two spaces, 2024 and <s> again\n"
    assert load_tokenizer(file)(text).input_ids == tokenizer(text).input_ids


def test_the_line_about_its_origin_says_what_is_loaded(tmp_path) -> None:
    for kind, wanted in (
        (Type.Q4_0, "a.gguf was quantised to Q4_0; its weights are loaded, not the original's"),
        (Type.F16, "a.gguf holds F16"),
    ):
        config = configuration_of(GGUFFile(write_gguf(tmp_path / "a.gguf", kind=kind)))
        assert describe_origin(config) == wanted
    assert describe_origin(made_model().config) is None


def test_rotary_factors_of_llama_3_are_taken_over(tmp_path) -> None:
    """transformers' own reader drops them, which is another model at long distances."""
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = made_model(rope_parameters=scaled)
    plain = 500000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).float()
    assert factors.max() > 30 and factors.min() == pytest.approx(1.0)
    file = write_gguf(tmp_path / "a.gguf", model, tensors={"rope_freqs.weight": factors.numpy()})
    base, _ = npt.load_base(str(file))
    assert base.config.rope_parameters == scaled
    torch.testing.assert_close(logits(base), logits(model), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaled_positions_are_taken_over(entries, wanted, tmp_path) -> None:
    metadata = {f"llama.rope.scaling.{key}": value for key, value in entries.items()}
    config = configuration_of(GGUFFile(write_gguf(tmp_path / "a.gguf", metadata=metadata)))
    assert wanted.items() <= config.rope_parameters.items()


def test_weights_of_several_files_have_an_index(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("npt.base.shards.SHARD_BYTES", 100_000)
    model = made_model()
    npt.import_base(write_gguf(tmp_path / "a.gguf", model), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    whole, _ = npt.load_base(str(tmp_path / "out"))
    torch.testing.assert_close(logits(whole), logits(model), rtol=0, atol=2e-3)
