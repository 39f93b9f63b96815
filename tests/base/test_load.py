import io
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import npt
from npt.adapters.converted import adapter_parameters
from npt.base.source import load_tokenizer, read_config
from npt.errors import ConfigError, ModelError

IN_4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
QUANTIZATIONS = pytest.mark.parametrize("quantization", ["nf4", None])
SOME_WEIGHT = "model.layers.1.mlp.up_proj.weight"
SOME_BIAS = "model.layers.1.self_attn.q_proj.bias"
SOME_LORA = "model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def copy(load_model, llama_folder: Path, tmp_path: Path) -> Path:
    """The random Llama in a folder of its own, with its tokenizer, to be damaged."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def as_config(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(content)


def in_config(**entries) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))

    return change


def in_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def refused(model: str | Path, words: str, kind: type = ModelError, **how) -> str:
    """Return the one line, with these words, in which a model is refused."""
    with pytest.raises(kind, match=words) as refusal:
        npt.load_base(str(model), device="cpu", **how)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@QUANTIZATIONS
def test_the_base_comes_frozen_in_evaluation_with_its_tokenizer(
    llama_folder, load_model, quantization
):
    model, tokenizer = npt.load_base(str(llama_folder), quantization=quantization, device="cpu")
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules())
    assert tokenizer("def f(x):")["input_ids"]


@pytest.mark.parametrize("left_out", [None, "max_position_embeddings"])
def test_what_data_must_keep_to_needs_the_familys_class_only_for_what_is_left_out(copy, left_out):
    config = json.loads((copy / "config.json").read_text())
    config.pop(left_out, None)
    (copy / "config.json").write_text(json.dumps(config))
    bare = read_config(str(copy), whole=False)
    whole = read_config(str(copy))
    for name in ("vocab_size", "max_position_embeddings"):
        assert getattr(bare, name) == getattr(whole, name)
    assert isinstance(bare, type(whole)) == (left_out is not None)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize(
    "entries",
    [
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {},
    ],
    ids=lambda entries: entries.get("tokenizer_class", "unsaid"),
)
def test_the_tokenizer_is_that_of_transformers_without_the_familys_class(copy, family, entries):
    in_config(model_type=family)(copy)
    path = copy / "tokenizer_config.json"
    stored = json.loads(path.read_text())
    del stored["tokenizer_class"]
    path.write_text(json.dumps(stored | entries))
    own = load_tokenizer(str(copy))
    theirs = AutoTokenizer.from_pretrained(str(copy))
    assert type(own) is type(theirs)
    text = "def f(x):\n    return x  # é"
    assert own(text).input_ids == theirs(text).input_ids
    assert own.init_kwargs == theirs.init_kwargs


@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
def test_the_embedded_model_loads_by_name_without_a_network(quantization):
    model, tokenizer = npt.load_base("tiny", quantization=quantization, device="cpu")
    ids = tokenizer("import os\n", return_tensors="pt")["input_ids"]
    assert len(tokenizer) <= model.config.vocab_size
    assert tokenizer.eos_token_id == model.config.eos_token_id
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


@torch.no_grad()
def test_an_unquantised_base_computes_in_fp32_or_on_request_in_fp16(load_model, batch):
    full, half = load_model(None), load_model(None, use_fp16=True)
    assert {p.dtype for p in full.parameters()} == {torch.float32}
    assert {p.dtype for p in half.parameters()} == {torch.float16}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(None, use_fp16=True)
    assert half(batch.input_ids).logits.dtype == torch.float16


@torch.no_grad()
def test_fp16_under_quantisation_gives_one_warning_and_fp32(load_model, batch):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_model("nf4", use_fp16=True)
    # those of bitsandbytes before 0.50 about torch
    caught = [one for one in caught if one.category is not FutureWarning]
    assert len(caught) == 1
    assert str(caught[0].message).startswith(
        "--use_fp16 has no effect on a 4-bit base, which computes in fp32"
    )
    assert torch.equal(model(batch.input_ids).logits, load_model("nf4")(batch.input_ids).logits)


class TestPackedCheckpoint:
    """A checkpoint that was saved in 4 bit."""

    @pytest.fixture
    def packed(self, load_model, copy) -> Path:
        load_model("nf4").save_pretrained(copy)
        return copy

    @torch.no_grad()
    @QUANTIZATIONS
    def test_stays_as_it_was_saved(self, load_model, packed, batch, quantization):
        model, _ = npt.load_base(str(packed), quantization=quantization, device="cpu")
        original = load_model("nf4")
        assert npt.base_hash(model) == npt.base_hash(original)
        assert torch.equal(model(batch.input_ids).logits, original(batch.input_ids).logits)

    def test_is_refused_when_another_code_is_asked_for(self, packed):
        refused(packed, "is stored as nf4, not fp4", quantization="fp4")


class TestRefused:
    @pytest.mark.parametrize("quantization", ["int8", "NF4", ""])
    def test_a_quantisation_that_does_not_exist(self, llama_folder, quantization):
        said = rf"quantization is '{quantization}'; choose from nf4, fp4, None"
        refused(llama_folder, said, ConfigError, quantization=quantization)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("", "the model's name is empty"),
            ("../nowhere/model", "there is no model folder '../nowhere/model'"),
            ("~/nowhere-at-all", "there is no model folder '~/nowhere-at-all'"),
            ("a/b/c", "cannot load the configuration of 'a/b/c'"),
            ("no-such-team/no-such-model", "the configuration of 'no-such-team/no-such-model'"),
        ],
    )
    def test_a_name_of_nothing_in_one_line(self, name, message):
        refused(name, message)

    def test_a_file_where_a_folder_belongs(self, copy):
        refused(copy / "model.safetensors", r"model\.safetensors has no config")

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
            (as_config("{"), r"cannot load the configuration of .*not a valid JSON"),
            (as_config("{}"), r"cannot load the configuration of .*model_type"),
            (as_config('{"model_type": "gpt2"}'), r"is of type 'gpt2'; NPT supports only llama"),
            (
                as_config('{"model_type": "granite"}'),
                r"is of type 'granite'; NPT supports only llama, mistral",
            ),
            (in_config(hidden_size="wide"), r"hidden_size"),
            (
                in_config(hidden_size=65, head_dim=None),
                r"cannot load the configuration of .*65\) is not a multiple of the number of att",
            ),
            (in_config(num_key_value_heads=3), r"key heads must divide query heads"),
            (
                in_config(intermediate_size=10**9),
                r"weights by its config\.json, but its files have",
            ),
            (
                in_config(quantization_config={**IN_4_BITS, "bnb_4bit_quant_type": "x"}),
                r"is quantised, but not to bitsandbytes' 4 bits",
            ),
            (lambda f: (f / "tokenizer.json").unlink(), r"cannot load the tokenizer of"),
            (lambda f: (f / "model.safetensors").unlink(), r"load the weights of .*\.safetensors"),
            (lambda f: os.mkfifo(f / "vocab.json"), r"vocab\.json is a pipe, not a file"),
            (truncate, r"cannot load the weights of"),
            (
                in_weights(lambda t: (t.pop(SOME_WEIGHT), t.pop("lm_head.weight"))),
                r"lacks the weight lm_head\.weight \(2 in all\)",
            ),
            (
                in_weights(
                    lambda t: t.update({SOME_WEIGHT: torch.zeros(3, 64, dtype=torch.bfloat16)})
                ),
                SOME_WEIGHT,
            ),
        ],
    )
    @QUANTIZATIONS
    def test_a_folder_that_is_damaged_in_one_line_naming_it(
        self, copy, quantization, damage, message
    ):
        damage(copy)
        assert str(copy) in refused(copy, message, quantization=quantization)

    @pytest.mark.parametrize("value", [0, -1, 10**7, "4", 2.5, True, None])
    def test_a_number_of_layers_that_no_model_has(self, copy, value):
        """transformers lists and builds them all, or raises from within."""
        in_config(num_hidden_layers=value)(copy)
        with pytest.raises(ModelError, match=rf"has num_hidden_layers '?{value}'?: "):
            read_config(str(copy))

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (as_config("{}"), r"cannot load the configuration of .*model_type"),
            (as_config('{"model_type": "gpt2"}'), r"is of type 'gpt2'; NPT supports only llama"),
            (in_config(vocab_size=0), r"has vocab_size 0: expected a whole number"),
            (in_config(num_key_value_heads=3), r"key heads must divide query heads"),
            (in_config(intermediate_size=10**9), r"weights by its config\.json, but its files"),
            (in_config(rope_parameters={"rope_type": "longrope"}), "uses LongRoPE"),
            (in_config(rope_parameters=None, rope_scaling={"type": "longrope"}), "uses LongRoPE"),
            (in_config(rope_parameters="long"), r"cannot load the configuration of"),
        ],
    )
    def test_a_configuration_is_refused_by_its_bare_entries_as_well(self, copy, damage, message):
        damage(copy)
        with pytest.raises(ModelError, match=message) as caught:
            read_config(str(copy), whole=False)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "entries",
        [
            {"vocab_size": 0},
            {"intermediate_size": 0},
            {"num_attention_heads": 0},
            {"head_dim": -8},
            {"rms_norm_eps": float("nan")},
            {"rope_parameters": {"rope_theta": 0}},
            {"model_type": "qwen2", "num_hidden_layers": 10**12},
            {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**12}},
            {"model_type": "mixtral", "num_local_experts": 10**12},
        ],
    )
    def test_a_size_that_no_model_has(self, copy, entries):
        in_config(**entries)(copy)
        with pytest.raises(
            ModelError, match=r": (expected a|NPT supports at most 2,000)"
        ) as caught:
            read_config(str(copy))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("later", [False, True])
    @pytest.mark.parametrize(
        ("damage", "name"),
        [
            (
                in_config(num_hidden_layers=3),
                r"model\.layers\.3\.input_layernorm\.weight \(9 in all",
            ),
            (in_weights(lambda t: t.update({SOME_BIAS: torch.zeros(64)})), SOME_BIAS),
            (in_weights(lambda t: t.update({SOME_LORA: torch.zeros(4, 64)})), SOME_LORA),
        ],
    )
    def test_weights_that_the_model_would_ignore(self, copy, damage, name, later):
        damage(copy)
        refused(copy, f"has the weight {name}.* config.json does not have", layers_later=later)

    @pytest.mark.parametrize("later", [False, True])
    def test_layers_in_4_bits_that_the_model_would_ignore(self, load_model, copy, later):
        load_model("nf4").save_pretrained(copy)
        in_config(num_hidden_layers=3)(copy)
        refused(copy, r"has the weight model\.layers\.3\..* \(9 in all\)", layers_later=later)


def test_buffers_and_tied_heads_of_older_checkpoints_are_no_extra_weights(copy):
    def add(tensors):
        for name in ("model", "model.layers.1.self_attn"):
            tensors[f"{name}.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    in_weights(add)(copy)
    in_config(tie_word_embeddings=True)(copy)
    for later in (False, True):
        npt.load_base(str(copy), device="cpu", layers_later=later)


class TestBaseHash:
    def test_tells_quantisations_and_dtypes_apart(self, load_model):
        models = [
            load_model("nf4"),
            load_model("fp4"),
            load_model(None),
            load_model(None, use_fp16=True),
        ]
        assert len({npt.base_hash(model) for model in models}) == 4

    @QUANTIZATIONS
    def test_does_not_see_adapters_modes_or_a_forward(self, load_model, batch, quantization):
        model = load_model(quantization)
        before = npt.base_hash(model)
        npt.attach(model, npt.NPTConfig(rank=4))
        assert npt.base_hash(model) == before
        with torch.no_grad():
            adapter_parameters(model)["model.layers.2.npt.A"].add_(1)
            model(batch.input_ids)
        model.train()
        assert npt.base_hash(model) == before
        npt.detach(model)
        assert npt.base_hash(model) == before

    @pytest.mark.parametrize(
        "tensor",
        [
            lambda m: m.get_submodule("model.layers.2.self_attn.q_proj").weight.data,
            lambda m: m.get_submodule("model.layers.2.self_attn.q_proj").weight.quant_state.absmax,
            lambda m: (
                m.get_submodule("model.layers.2.self_attn.q_proj").weight.quant_state.state2.absmax
            ),
            lambda m: m.get_submodule("model.layers.0.input_layernorm").weight.data,
            lambda m: m.model.embed_tokens.weight.data,
            lambda m: m.lm_head.weight.data,
        ],
        ids=["packed byte", "absmax", "absmax of the absmax", "norm", "embedding", "head"],
    )
    def test_changes_with_a_single_bit_and_comes_back(self, load_model, tensor):
        model = load_model("nf4")
        before = npt.base_hash(model)
        first_byte = tensor(model).view(torch.uint8).view(-1)[:1]
        first_byte ^= 1
        assert npt.base_hash(model) != before
        first_byte ^= 1
        assert npt.base_hash(model) == before


class TestNothingOfACheckpointIsRun:
    """Code with the weights, a pickle instead of them: refused or passed over, without a question
    on the terminal.
    """

    @pytest.fixture
    def trapped(self, copy, monkeypatch) -> Path:
        """A model folder with code that leaves a trace; `y` is on standard input, as the answer to
        a question.
        """
        (copy / "trap.py").write_text(
            f"from pathlib import Path\nPath({str(copy / 'sprung')!r}).touch()\nclass Trap: pass\n"
        )
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
        monkeypatch.setattr("builtins.input", lambda *_: "y")
        return copy

    def in_tokenizer(self, folder: Path, **entries) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | entries))

    def test_code_of_a_known_kind_of_model_is_passed_over(self, trapped):
        in_config(auto_map={"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"})(
            trapped
        )
        self.in_tokenizer(trapped, auto_map={"AutoTokenizer": ["trap.Trap", "trap.Trap"]})
        model, _ = npt.load_base(str(trapped), quantization="nf4", device="cpu")
        assert type(model).__name__ == "LlamaForCausalLM"
        assert not (trapped / "sprung").exists()

    def test_code_of_an_unknown_kind_is_refused(self, trapped):
        in_config(
            model_type="trap",
            auto_map={"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"},
        )(trapped)
        for load in (read_config, npt.load_base):
            with pytest.raises(ModelError, match=r"cannot load the configuration of .*custom code"):
                load(str(trapped))
        assert not (trapped / "sprung").exists()

    def test_code_of_a_tokenizer_is_refused(self, trapped):
        self.in_tokenizer(
            trapped, tokenizer_class="Trap", auto_map={"AutoTokenizer": ["trap.Trap", None]}
        )
        refused(trapped, r"cannot load the tokenizer of .*custom code")
        assert not (trapped / "sprung").exists()

    def test_a_pickle_of_weights_is_refused(self, trapped):
        class Trap:
            def __reduce__(self):
                return (Path.touch, (trapped / "sprung",))

        (trapped / "model.safetensors").unlink()
        for weights in (Trap(), {SOME_WEIGHT: torch.zeros(2)}):
            torch.save(weights, trapped / "pytorch_model.bin")
            said = r"cannot load the weights of .*model\.safetensors.*a local folder with safet"
            refused(trapped, said)
        assert not (trapped / "sprung").exists()
