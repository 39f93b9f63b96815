import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

import npt
from npt.adapters.converted import adapter_parameters
from npt.base.load import check_placement, read_config
from npt.errors import ConfigError, ModelError

QUANTIZATIONS = pytest.mark.parametrize("quantization", ["nf4", None])
SOME_WEIGHT = "model.layers.1.mlp.up_proj.weight"


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


@QUANTIZATIONS
def test_the_base_comes_frozen_in_evaluation_with_its_tokenizer(
    llama_folder, load_model, quantization
):
    model, tokenizer = npt.load_base(str(llama_folder), quantization=quantization, device="cpu")
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules())
    assert tokenizer("def f(x):")["input_ids"]


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
        "--use_quantization with --use_fp16: fp16 is not used, the 4-bit base computes in fp32"
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
        with pytest.raises(ModelError, match="is stored as nf4 but fp4 was asked for"):
            npt.load_base(str(packed), quantization="fp4", device="cpu")


class TestRefused:
    @pytest.mark.parametrize("quantization", ["int8", "NF4", ""])
    def test_a_quantisation_that_does_not_exist(self, llama_folder, quantization):
        with pytest.raises(
            ConfigError, match=rf"quantization is '{quantization}'; choose from nf4, fp4, None"
        ):
            npt.load_base(str(llama_folder), quantization=quantization, device="cpu")

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
        with pytest.raises(ModelError, match=message) as refusal:
            npt.load_base(name, device="cpu")
        assert "\n" not in str(refusal.value)

    def test_a_file_where_a_folder_belongs(self, copy):
        with pytest.raises(ModelError, match=r"model\.safetensors holds no config"):
            npt.load_base(str(copy / "model.safetensors"), device="cpu")

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda f: (f / "config.json").unlink(), r"holds no config\.json"),
            (as_config("{"), r"cannot load the configuration of .*not a valid JSON"),
            (as_config("{}"), r"cannot load the configuration of .*model_type"),
            (as_config('{"model_type": "gpt2"}'), r"is of type 'gpt2'; only llama"),
            (as_config('{"model_type": "granite"}'), r"is of type 'granite'; only llama, mistral"),
            (in_config(hidden_size="wide"), r"hidden_size"),
            (lambda f: (f / "tokenizer.json").unlink(), r"cannot load the tokenizer of"),
            (lambda f: (f / "model.safetensors").unlink(), r"load the weights of .*\.safetensors"),
            (truncate, r"cannot load the weights of"),
            (
                in_weights(lambda t: (t.pop(SOME_WEIGHT), t.pop("lm_head.weight"))),
                r"lacks the weight lm_head\.weight \(2 such\)",
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
        with pytest.raises(ModelError, match=message) as refusal:
            npt.load_base(str(copy), quantization=quantization, device="cpu")
        assert str(copy) in str(refusal.value)
        assert "\n" not in str(refusal.value)


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
        with pytest.raises(ModelError, match=r"cannot load the tokenizer of .*custom code"):
            npt.load_base(str(trapped), device="cpu")
        assert not (trapped / "sprung").exists()

    def test_a_pickle_of_weights_is_refused(self, trapped):
        class Trap:
            def __reduce__(self):
                return (Path.touch, (trapped / "sprung",))

        (trapped / "model.safetensors").unlink()
        for weights in (Trap(), {SOME_WEIGHT: torch.zeros(2)}):
            torch.save(weights, trapped / "pytorch_model.bin")
            with pytest.raises(
                ModelError,
                match=r"cannot load the weights of .*model\.safetensors.*a local folder with safet",
            ):
                npt.load_base(str(trapped), device="cpu")
        assert not (trapped / "sprung").exists()


@pytest.mark.parametrize("places", ["auto", "sequential", {"": "cpu"}])
def test_a_base_can_be_spread_over_what_there_is(
    llama_folder, load_model, batch, monkeypatch, places
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    expected = load_model()
    with torch.no_grad():
        model, _ = npt.load_base(str(llama_folder), quantization="nf4", device_map=places)
        assert torch.equal(model(batch.input_ids).logits, expected(batch.input_ids).logits)
    assert npt.base_hash(model) == npt.base_hash(expected)


def places(**elsewhere: str) -> dict[str, str]:
    parts = [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{i}" for i in range(4)),
    ]
    return dict.fromkeys(parts, "cpu") | {
        f"model.layers.{layer.removeprefix('layer')}": place for layer, place in elsewhere.items()
    }


def test_a_base_of_which_a_part_would_stay_on_disk_is_refused(llama_folder, load_model):
    with pytest.raises(ModelError, match=r"not all on the GPUs: model\.layers\.3\."):
        npt.load_base(str(llama_folder), device_map=places(layer3="disk"))


def norm_on_host(model) -> None:
    layer = model.model.layers[1].input_layernorm
    layer.weight = torch.nn.Parameter(torch.empty(64), requires_grad=False)


def rotary_on_host(model) -> None:
    model.model.rotary_emb.inv_freq = torch.empty(8)


def product_on_disk(model) -> None:
    layer = model.model.layers[2].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.empty(128, 64, device="meta"), requires_grad=False)


def norm_elsewhere(model) -> None:
    layer = model.model.layers[1].input_layernorm
    layer.weight = torch.nn.Parameter(claimed(layer.weight, "cuda:1"), requires_grad=False)


def claimed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor on a device that need not exist, without storage."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (norm_on_host, r"base is not all on the GPUs: model\.layers\.1\.input_layernorm\.weight "),
        (rotary_on_host, r"not all on the GPUs: model\.rotary_emb\.inv_freq "),
        (product_on_disk, r"not all on the GPUs: model\.layers\.2\.mlp\.up_proj\.weight "),
        (norm_elsewhere, r"layers\.1 on cuda:0 and cuda:1; a layer must stay in one piece"),
    ],
)
def test_what_is_left_behind_is_refused_by_name(load_model, leave, message):
    model = load_model(None)
    check_placement("base", model)  # of one on the host alone
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = claimed(buffer, "cuda:0")
        for name, weight in module._parameters.items():
            if weight is not None:
                weight = torch.nn.Parameter(claimed(weight, "cuda:0"), requires_grad=False)
                module._parameters[name] = weight
    check_placement("base", model)
    leave(model)
    with pytest.raises(ModelError, match=message):
        check_placement("base", model)


def test_a_device_map_that_means_nothing_is_refused():
    with pytest.raises(ModelError, match="'sequential' but found everywhere"):
        npt.load_base("tiny", device_map="everywhere")
    with pytest.raises(ConfigError, match="device is cpu and device_map 'auto'; drop one"):
        npt.load_base("tiny", device_map="auto", device="cpu")


def test_a_base_that_is_packed_elsewhere_stays_where_it_was_read_to(
    llama_folder, load_model, monkeypatch
):
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    packed, convert, ops = [], Bnb4bitQuantize.convert, Bnb4BitHfQuantizer.get_quantize_ops
    expected = load_model()

    def noted(self, input_dict, *arguments, **named):
        packed.extend(input_dict)
        return convert(self, input_dict, *arguments, **named)

    monkeypatch.setattr(Bnb4bitQuantize, "convert", noted)
    model, _ = npt.load_base(str(llama_folder), quantization="nf4", device="cpu", pack_on="cpu")
    assert len(set(packed)) == 4 * 7  # every product of every layer came by
    assert npt.base_hash(model) == npt.base_hash(expected)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert Bnb4BitHfQuantizer.get_quantize_ops is ops  # the next base is packed where it stays
