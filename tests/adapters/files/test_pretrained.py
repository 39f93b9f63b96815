"""A student from its adapter alone: the base that it knows, the folders that it is found in, the
code on its card.
"""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from students import moved
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import npt
from npt.adapters.files import hub
from npt.adapters.files.adapter_files import CARD_NAME, CONFIG_NAME, FILES
from npt.adapters.files.hub import adapter_folder
from npt.base.recipe import ENTRY, Recipe
from npt.base.source import EMBEDDED_FOLDER
from npt.errors import AdapterFileError, ModelError

RECIPES = {
    "nf4": {"quantization": "nf4"},
    "fp4, bf16 products": {"quantization": "fp4", "compute_dtype": "bf16"},
    "fp32": {},
    "fp16": {"use_fp16": True},
    "bf16": {"dtype": "bf16"},
    "nf4, scales once, the rest in fp16": {
        "quantization": "nf4",
        "dtype": "fp16",
        "double_quant": False,
    },
}
IDS = torch.tensor([[1, 5, 9, 33]])


def saved(folder: Path, loaded: dict[str, Any], name: str = "tiny") -> Any:
    """A student that differs from its start, and what it gives."""
    model, _ = npt.load_base(name, device="cpu", **loaded)
    npt.attach(model, npt.NPTConfig(rank=2, layers="3"), seed=4)
    moved(model, 0.1)
    with torch.no_grad():
        npt.save_adapter(model, folder)
        return model(IDS).logits


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_student_is_loaded_as_it_was_saved_and_says_the_same(tmp_path, recipe):
    logits = saved(tmp_path / "adapter", RECIPES[recipe])
    model, tokenizer = npt.from_pretrained(tmp_path / "adapter", device="cpu")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    assert tokenizer("def ")["input_ids"] and not model.training


def test_the_recipe_that_is_written_is_what_load_base_was_given(tmp_path):
    for recipe, loaded in RECIPES.items():
        model, _ = npt.load_base("tiny", device="cpu", **loaded)
        expected = Recipe(**{"double_quant": "quantization" in loaded, **loaded})
        assert Recipe.of(model) == expected, recipe
        assert Recipe.of_record({ENTRY: asdict(expected)}) == expected
        assert expected.arguments == loaded


def four_bit(**how: Any) -> dict[str, Any]:
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **how)}


OWN = {
    "as the checkpoint is stored": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "transformers' own 4 bit": four_bit(),
    "nf4": four_bit(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "nf4 once, the rest in fp32": {**four_bit(bnb_4bit_quant_type="nf4"), "dtype": torch.float32},
    "nf4, all else in bf16": {
        **four_bit(bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
        "dtype": torch.bfloat16,
    },
}
"""How a user may load a base with transformers."""


@pytest.mark.parametrize(
    ("case", "stored"),
    [
        *((case, torch.bfloat16) for case in OWN),
        ("as the checkpoint is stored", torch.float32),
        ("nf4", torch.float32),
    ],
)
def test_a_base_of_the_users_own_is_loaded_as_he_did(tmp_path, case, stored):
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=stored).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_FOLDER).save_pretrained(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, **OWN[case]).eval()
    npt.attach(own, npt.NPTConfig(rank=2, layers="3"))
    npt.save_adapter(own, tmp_path / "adapter")
    model, _ = npt.from_pretrained(tmp_path / "adapter", device="cpu")
    assert npt.base_identity(model).mismatch(npt.base_identity(own).as_record()) is None
    if own.config.to_dict().get("quantization_config") is None:
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, own(IDS).logits)


def test_a_base_that_no_recipe_describes_is_said_to_be_one(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_FOLDER, dtype=torch.float32)
    model.config.quantization_config = {"quant_method": "another"}
    npt.attach(model, npt.NPTConfig(rank=2, layers="3"))
    npt.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(
        AdapterFileError, match=r"load the base as in training and call npt\.load_a"
    ):
        npt.from_pretrained(tmp_path / "adapter", device="cpu")


def test_a_record_without_the_bases_loading_is_refused_with_a_remedy(tmp_path):
    saved(tmp_path / "adapter", RECIPES["nf4"])
    path = tmp_path / "adapter" / CONFIG_NAME
    record, recipe = json.loads(path.read_text()), asdict(Recipe())
    for spoilt in (
        [],
        {},
        {"quantization": "nf4"},
        {**recipe, "quantization": "nf5"},
        {**recipe, "use_fp16": 1},
        None,
    ):
        path.write_text(
            json.dumps({k: v for k, v in {**record, ENTRY: spoilt}.items() if v is not None})
        )
        with pytest.raises(
            AdapterFileError,
            match=r"does not record how its base was loaded.*npt\.load_adapter\(model",
        ):
            npt.from_pretrained(tmp_path / "adapter", device="cpu")
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.load_adapter(model, tmp_path / "adapter")


def test_the_base_may_lie_elsewhere_and_another_one_is_refused(tmp_path):
    logits = saved(tmp_path / "adapter", RECIPES["nf4"])
    moved = shutil.copytree(EMBEDDED_FOLDER, tmp_path / "moved")
    model, _ = npt.from_pretrained(tmp_path / "adapter", base_name=str(moved), device="cpu")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(AdapterFileError, match="trained on another base"):
        npt.from_pretrained(tmp_path / "adapter", base_name=str(moved), device="cpu")
    npt.from_pretrained(tmp_path / "adapter", base_name=str(moved), device="cpu", check_base=False)


def test_an_adapter_is_looked_for_once(tmp_path, monkeypatch):
    saved(tmp_path / "run" / "adapter", RECIPES["fp32"])
    looked: list[Path] = []
    places = hub.adapter_places
    monkeypatch.setattr(hub, "adapter_places", lambda path: looked.append(path) or places(path))
    npt.from_pretrained(tmp_path / "run", device="cpu")
    assert looked == [tmp_path / "run"]


class TestFolders:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        for place in (
            "best",
            "checkpoints/step-00000002",
            "checkpoints/step-99999999",
            "checkpoints/step-100000000",
            "checkpoints/step-00000030.broken",
            ".",
        ):
            folder = tmp_path / "run" / place / "adapter"
            folder.mkdir(parents=True)
            (folder / CONFIG_NAME).write_text("{}")
        return tmp_path / "run"

    def test_of_a_run_it_is_the_best_else_the_last(self, run):
        assert adapter_folder(run, FILES) == run / "best" / "adapter"
        shutil.rmtree(run / "best")
        assert adapter_folder(run, FILES) == run / "adapter"
        shutil.rmtree(run / "adapter")
        for name in ("step-100000000", "step-99999999"):  # by number, not by name
            assert adapter_folder(run, FILES) == run / "checkpoints" / name / "adapter"
            shutil.rmtree(run / "checkpoints" / name)

    def test_a_checkpoint_and_an_adapters_folder_give_their_own_adapter(self, run):
        checkpoint = run / "checkpoints" / "step-00000002"
        assert (
            adapter_folder(checkpoint, FILES)
            == adapter_folder(checkpoint / "adapter", FILES)
            == checkpoint / "adapter"
        )

    def test_a_folder_without_any_is_left_for_the_message(self, tmp_path):
        with pytest.raises(
            AdapterFileError, match=rf"{re.escape(str(tmp_path))} has no {CONFIG_NAME}"
        ):
            npt.from_pretrained(tmp_path)


def snippets(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)


def test_the_code_on_the_card_runs_as_printed_in_the_cards_folder(tmp_path, monkeypatch):
    logits = saved(tmp_path / "adapter", RECIPES["nf4"])
    monkeypatch.chdir(tmp_path / "adapter")
    (code,) = snippets(Path(CARD_NAME).read_text())
    names: dict[str, Any] = {}
    exec(code, names)
    with torch.no_grad():
        assert torch.equal(names["model"](IDS).logits, logits), code


def test_only_a_detached_model_is_saved_as_a_whole(load_model, tmp_path):
    model = load_model(None)
    npt.attach(model, npt.NPTConfig(rank=2, layers="1"))
    with pytest.raises(ModelError, match=r"does not support .*student with npt\.save_adapter"):
        model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    npt.detach(model)
    model.save_pretrained(tmp_path / "base")
    assert (tmp_path / "base" / "config.json").is_file()
