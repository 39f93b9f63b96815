import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from token_students import IDS, student

import npt
from npt.adapters.converted import adapter_parameters, is_attached
from npt.adapters.files.adapter_files import WEIGHTS_NAME
from npt.errors import AdapterFileError, ModelError

peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def registered():
    npt.register_peft()


@pytest.fixture
def folder(load_model, tmp_path):
    return npt.save_adapter(student(load_model), tmp_path / "adapter")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits


def load(load_model, folder, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return peft.PeftModel.from_pretrained(load_model(), folder, **arguments)


def test_peft_loads_a_folder_bit_for_bit(load_model, folder):
    model = load(load_model, folder, adapter_name="some")
    assert isinstance(model, peft.PeftModelForCausalLM)
    assert model.peft_config["some"].peft_type == "NPT"
    assert torch.equal(logits(model), logits(student(load_model)))
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_the_adapter_is_switched_off_and_on_as_any_other(load_model, folder):
    model, plain = load(load_model, folder), logits(load_model())
    student_logits = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), student_logits)
    base = model.unload()
    assert torch.equal(logits(base), plain) and not is_attached(base)


def test_trained_and_saved_through_peft_it_loads_here(load_model, folder, tmp_path):
    model = load(load_model, folder, is_trainable=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(trainable) == len(adapter_parameters(model.get_base_model()))
    model(input_ids=torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    with torch.no_grad():
        for parameter in trainable:
            parameter -= 0.1 * parameter.grad
    model.save_pretrained(tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / WEIGHTS_NAME)) == set(
        load_file(folder / WEIGHTS_NAME)
    )
    other = load_model()
    npt.load_adapter(other, tmp_path / "saved")
    assert torch.equal(logits(other), logits(model)) and not torch.equal(
        logits(other), logits(student(load_model))
    )


def test_another_base_is_said(load_model, folder):
    with pytest.warns(
        UserWarning, match=r"was trained on another base: 4-bit codes .* here; npt\.load_base"
    ):
        peft.PeftModel.from_pretrained(load_model("fp4"), folder)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.popitem(), lambda t: next(iter(t.values())).fill_(float("nan"))],
    ids=["missing", "NaN"],
)
def test_a_damaged_adapter_is_refused(load_model, folder, change):
    tensors = load_file(folder / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(AdapterFileError, match=r"or not finite; the adapter is refused"):
        peft.PeftModel.from_pretrained(load_model(), folder)


def test_what_does_not_go_with_it_is_refused(load_model, folder):
    model = load(load_model, folder)
    before = logits(model)
    with pytest.raises(ModelError, match="cannot be merged"):
        model.merge_and_unload()
    with pytest.raises(ModelError, match="alone on its model"):
        model.load_adapter(folder, "second")
    assert torch.equal(logits(model), before) and list(model.peft_config) == ["default"]


def test_nothing_is_registered_unless_it_is_asked_for(load_model, folder, monkeypatch):
    monkeypatch.delitem(peft.PEFT_TYPE_TO_TUNER_MAPPING, "NPT")
    npt.load_adapter(load_model(), folder)
    assert "NPT" not in peft.PEFT_TYPE_TO_TUNER_MAPPING
    with pytest.raises((KeyError, ValueError)):
        peft.get_peft_model(load_model(), peft.PeftConfig.from_pretrained(folder))
