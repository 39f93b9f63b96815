import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rounded import round_otherwise
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from students import moved

import npt
from npt.adapters.converted import adapter_parameters, attached_config, is_attached
from npt.adapters.files.adapter_files import CARD_NAME, CONFIG_NAME, WEIGHTS_NAME, find_adapter
from npt.errors import AdapterFileError

CONFIG = npt.NPTConfig(
    layers="1,3", rank=4, targets=("gate", "down"), additive_scale=0.3, mult_bound=0.25
)
FILES = {CONFIG_NAME, WEIGHTS_NAME, CARD_NAME}
SOME_TENSOR = "base_model.model.model.layers.1.npt.B.gate"


def student(load_model, config: npt.NPTConfig = CONFIG, seed: int = 0):
    model = load_model()
    npt.attach(model, config)
    return moved(model, 1.0, seed)


def values(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in adapter_parameters(model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.fixture
def saved(load_model, tmp_path: Path) -> Path:
    return npt.save_adapter(student(load_model), tmp_path / "adapter", base_name="some/base")


class TestRoundTrip:
    def test_gives_every_parameter_back_bit_for_bit(self, load_model, batch, tmp_path):
        model = student(load_model)
        assert npt.save_adapter(model, tmp_path / "adapter") == tmp_path / "adapter"
        other = load_model()
        assert npt.load_adapter(other, str(tmp_path / "adapter")) == CONFIG
        assert attached_config(other) == CONFIG
        assert same(values(other), values(model))
        assert all(
            p.dtype == torch.float32 and p.requires_grad for p in adapter_parameters(other).values()
        )
        with torch.no_grad():
            assert torch.equal(other(batch.input_ids).logits, model(batch.input_ids).logits)

    def test_an_adapter_not_in_fp32_is_refused_by_name_and_not_written(self, load_model, tmp_path):
        model = student(load_model)
        parameter = adapter_parameters(model)["model.layers.1.npt.A"]
        parameter.data = parameter.data.half()  # without the module noticing
        with pytest.raises(
            AdapterFileError, match=r"layers\.1\.npt\.A is torch\.float16, but adapters are fp32"
        ):
            npt.save_adapter(model, tmp_path / "adapter")
        assert list(tmp_path.iterdir()) == []


class TestSave:
    def test_keeps_the_file_layout_of_peft(self, load_model, saved):
        assert {p.name for p in saved.iterdir()} == FILES
        record = json.loads((saved / CONFIG_NAME).read_text())
        assert {k: record[k] for k in ("peft_type", "base_model_name_or_path", "base_hash")} == {
            "peft_type": "NPT",
            "base_model_name_or_path": "some/base",
            "base_hash": npt.base_hash(load_model()),
        }
        assert record["base_parts"] == npt.base_identity(load_model()).as_record()["base_parts"]
        assert npt.NPTConfig(**record["npt"]) == CONFIG
        with safe_open(saved / WEIGHTS_NAME, framework="pt") as stored:
            expected = {
                f"base_model.model.model.layers.{i}.npt.{n}"
                for i in (1, 3)
                for n in ("A", "B.gate", "B.down", "M.gate", "M.down")
            }
            assert set(stored.keys()) == expected
            assert {stored.get_slice(key).get_dtype() for key in expected} == {"F32"}

    def test_card_names_the_base_and_every_setting(self, load_model, saved):
        card = (saved / CARD_NAME).read_text()
        assert "base_model: some/base" in card
        assert f"| base hash | {npt.base_hash(load_model())} |" in card
        assert "| targets | gate, down |" in card
        assert "| layers | 1,3 |" in card

    def test_base_name_defaults_to_the_models_own(self, load_model, llama_folder, tmp_path):
        npt.save_adapter(student(load_model), tmp_path / "adapter")
        assert json.loads((tmp_path / "adapter" / CONFIG_NAME).read_text())[
            "base_model_name_or_path"
        ] == str(llama_folder)

    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
    def test_a_poisoned_adapter_is_refused_by_name_and_leaves_the_saved_one_in_place(
        self, load_model, saved, poison
    ):
        before = {p.name: p.read_bytes() for p in saved.iterdir()}
        model = student(load_model)
        with torch.no_grad():
            model.model.layers[3].npt.M["down"][5, 1] = poison
        with pytest.raises(AdapterFileError, match=r"model\.layers\.3\.npt\.M\.down is not finite"):
            npt.save_adapter(model, saved)
        assert {p.name: p.read_bytes() for p in saved.iterdir()} == before

    def test_a_saved_adapter_is_replaced_and_nothing_is_left_behind(self, load_model, saved):
        model = student(load_model, seed=1)
        npt.save_adapter(model, saved)
        other = load_model()
        npt.load_adapter(other, saved)
        assert same(values(other), values(model))
        assert [p.name for p in saved.parent.iterdir()] == ["adapter"]

    def test_a_folder_with_other_things_is_refused_and_kept(self, load_model, tmp_path):
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter").write_text("mine")
        with pytest.raises(
            AdapterFileError, match=r"thesis contains other files than an NPT adapter \(chapter\)"
        ):
            npt.save_adapter(student(load_model), tmp_path / "thesis")
        assert (tmp_path / "thesis" / "chapter").read_text() == "mine"


def in_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_NAME)
        change(tensors)
        save_file(tensors, folder / WEIGHTS_NAME)

    return tamper


def in_record(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        record = json.loads((folder / CONFIG_NAME).read_text())
        change(record)
        (folder / CONFIG_NAME).write_text(json.dumps(record))

    return tamper


def setting(**settings) -> Callable[[Path], None]:
    return in_record(lambda record: record["npt"].update(settings))


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-100])


def with_value(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[SOME_TENSOR][3, 2] = value

    return change


DAMAGE = {
    "no folder": (
        lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(),
        r"there is no folder .*: pass a run folder or an adapter folder",
    ),
    "no configuration": (lambda f: (f / CONFIG_NAME).unlink(), r"has no adapter_config\.json"),
    "weights truncated": (truncate, r"adapter_model\.safetensors is damaged"),
    "wrong shape": (
        in_weights(lambda t: t.update({SOME_TENSOR: torch.zeros(128, 5)})),
        r"layers\.1\.npt\.B\.gate is F32 \[128, 5\], the model needs F32 \[128, 4\]",
    ),
    "wrong dtype": (
        in_weights(lambda t: t.update({SOME_TENSOR: t[SOME_TENSOR].bfloat16()})),
        r"layers\.1\.npt\.B\.gate is BF16 \[128, 4\], the model needs F32",
    ),
    "a tensor too many": (
        in_weights(lambda t: t.update(stranger=torch.zeros(1))),
        r"has the extra tensor 'stranger' \(1 in all\)",
    ),
    "a tensor missing": (
        in_weights(lambda t: t.pop(SOME_TENSOR)),
        r"lacks the tensor '.*layers\.1\.npt\.B\.gate' \(1 in all\)",
    ),
    "a value is NaN": (
        in_weights(with_value(float("nan"))),
        r"layers\.1\.npt\.B\.gate has a non-finite value",
    ),
    "unknown setting": (setting(colour="blue"), r"unknown or missing settings: 'colour'"),
    "missing setting": (
        in_record(lambda r: r["npt"].pop("rank")),
        r"unknown or missing settings: 'rank'",
    ),
    "setting out of its choices": (
        setting(targets=["sideways"]),
        r"invalid setting: --targets is 'sideways'",
    ),
    "layers that the model lacks": (
        setting(layers="1,99"),
        r"does not fit the model: --layers names layer 99",
    ),
    "not JSON": (lambda f: (f / CONFIG_NAME).write_text("{"), r"adapter_config\.json is damaged"),
    "rank larger than the model": (
        setting(rank=1000),
        r"does not fit the model: --adapter_rank is 1000",
    ),
    "another method's adapter": (in_record(lambda r: r.pop("npt")), r"no entry 'npt'"),
}


def test_a_folder_older_than_other_forms_loads_with_the_usual_one(load_model, saved):
    in_record(lambda r: [r["npt"].pop(name) for name in ("ranks", "mult_form")])(saved)
    assert npt.load_adapter(load_model(), saved).mult_form == "sigmoid"


class TestRefusedLoad:
    @pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
    def test_names_the_fault_and_leaves_the_model_as_it_was(
        self, load_model, saved, damage, message
    ):
        damage(saved)
        model = load_model()
        model.lm_head.weight.requires_grad_(True)
        before = npt.base_hash(model)
        classes = [type(m) for m in model.modules()]
        flags = {name: p.requires_grad for name, p in model.named_parameters()}
        with pytest.raises(AdapterFileError, match=message) as refusal:
            npt.load_adapter(model, saved)
        assert str(saved) in str(refusal.value)
        assert not is_attached(model)
        assert [type(m) for m in model.modules()] == classes
        assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
        assert npt.base_hash(model) == before

    @pytest.mark.parametrize(
        "name", ["weights truncated", "a value is NaN", "wrong shape", "not JSON"]
    )
    def test_leaves_attached_adapters_as_they_were(self, load_model, saved, name):
        damage, message = DAMAGE[name]
        damage(saved)
        model = student(load_model, seed=5)
        before = values(model)
        with pytest.raises(AdapterFileError, match=message):
            npt.load_adapter(model, saved)
        assert same(values(model), before)

    def test_adapters_of_another_configuration_are_not_overwritten(self, load_model, saved):
        model = student(load_model, npt.NPTConfig(layers="1", rank=4))
        before = values(model)
        with pytest.raises(AdapterFileError, match=r"layers='1,3'.*layers='1'.*npt\.detach"):
            npt.load_adapter(model, saved)
        assert same(values(model), before)

    def test_another_base_is_refused_with_both_hashes(self, load_model, saved):
        other = load_model(quantization="fp4")
        theirs, ours = (
            npt.base_identity(load_model()).codes[:12],
            npt.base_identity(other).codes[:12],
        )
        with pytest.raises(
            AdapterFileError,
            match=rf"another base \(.*\): 4-bit codes {ours}, expected {theirs}; .*--any_base",
        ):
            npt.load_adapter(other, saved)
        assert not is_attached(other)

    def test_statistics_that_a_device_rounds_otherwise_do_not_matter(self, load_model, saved):
        other = load_model()
        round_otherwise(other)
        assert npt.base_hash(other) != npt.base_hash(load_model())
        npt.load_adapter(other, saved)
        assert same(values(other), values(student(load_model)))
        assert npt.base_identity(other).mismatch(find_adapter(saved).record) is None

    def test_a_folder_that_records_no_base_is_refused(self, load_model, saved):
        in_record(lambda record: record.update(base_hash=None, base_parts=None))(saved)
        with pytest.raises(
            AdapterFileError, match=r"another base .*: configuration .* expected None"
        ):
            npt.load_adapter(load_model(), saved)
