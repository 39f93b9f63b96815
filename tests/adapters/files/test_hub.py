"""Against a hub on this machine: every call that huggingface_hub makes is a real one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from stub_hub import TOKEN, Hub, running
from token_students import IDS, student
from updates import random_update

import npt
from npt.adapters.consolidate import apply_update
from npt.adapters.converted import is_attached
from npt.adapters.files.adapter_files import CARD_NAME, CONFIG_NAME, WEIGHTS_NAME
from npt.adapters.files.consolidated_files import HISTORY_NAME, PATCHES_NAME
from npt.adapters.files.hub import is_hub_id
from npt.cli.main import main
from npt.errors import AdapterFileError, ConfigError, HubError

THREE = {CONFIG_NAME, WEIGHTS_NAME, CARD_NAME}
FIDELITY = {
    "student": {
        "perplexity": 11.5,
        "perplexity_ratio": 1.05,
        "perplexity_ratio_se": 0.003,
        "kl": 0.05,
        "top1": 0.86,
        "top1_se": None,
    }
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with running() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def _saved(load_model, tmp_path_factory) -> Path:
    return npt.save_adapter(
        student(load_model), tmp_path_factory.mktemp("saved") / "adapter", base_name="some/base"
    )


@pytest.fixture
def folder(_saved, tmp_path) -> Path:
    return Path(shutil.copytree(_saved, tmp_path / "adapter"))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits


def test_what_is_pushed_loads_again_by_its_name(hub: Hub, folder, load_model):
    address = npt.push_to_hub(folder, "me/adapter", private=True)
    assert address == f"{hub.url}/me/adapter/commit/{hub.commit_of('me/adapter')}"
    assert set(hub.files["me/adapter"]) == THREE and hub.private["me/adapter"]
    assert all(
        hub.files["me/adapter"][name] == (folder / name).read_bytes()
        for name in THREE - {CARD_NAME}
    )
    card = hub.files["me/adapter"][CARD_NAME].decode()
    assert card.count('"me/adapter"') == 1 and '"."' not in card
    assert card.replace("me/adapter", ".") == (folder / CARD_NAME).read_text()
    model = load_model()
    npt.load_adapter(model, "me/adapter")
    assert torch.equal(logits(model), logits(student(load_model)))


def test_of_a_runs_folder_its_adapter_is_pushed_with_its_updates(hub: Hub, tmp_path, load_model):
    model = student(load_model)
    apply_update(model, random_update(model))
    best = tmp_path / "run" / "best"
    best.mkdir(parents=True)
    npt.save_adapter(model, best / "adapter")
    npt.push_to_hub(tmp_path / "run", "me/adapter")
    assert set(hub.files["me/adapter"]) == {*THREE, HISTORY_NAME, PATCHES_NAME}
    other = load_model()
    npt.load_adapter(other, "me/adapter")
    assert torch.equal(logits(other), logits(model))


def test_only_the_files_of_an_adapter_travel_either_way(hub: Hub, folder, load_model, tmp_path):
    (folder / "secret.txt").write_text("mine")
    npt.push_to_hub(folder, "me/adapter")
    assert set(hub.files["me/adapter"]) == THREE
    hub.files["me/adapter"]["pytorch_model.bin"] = b"pickle"
    hub.files["me/adapter"]["modeling.py"] = b"raise SystemExit"
    hub.asked.clear()
    npt.load_adapter(load_model(), "me/adapter")
    gets = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
    assert {path.rsplit("/", 1)[1] for path in gets} == THREE


def test_a_revision_is_loaded_and_a_wrong_one_is_named(hub: Hub, folder, load_model):
    npt.push_to_hub(folder, "me/adapter")
    hub.branches["me/adapter"].add("v1")
    for revision in ("v1", hub.commit_of("me/adapter")):
        npt.load_adapter(load_model(), "me/adapter", revision=revision)
    npt.push_to_hub(folder, "me/adapter", revision="v1")
    for call in (
        lambda: npt.load_adapter(load_model(), "me/adapter", revision="nowhere"),
        lambda: npt.push_to_hub(folder, "me/adapter", revision="nowhere"),
    ):
        with pytest.raises(
            HubError, match=r"RevisionNotFoundError: .*; check the name, the revision"
        ):
            call()


def test_where_the_base_lies_on_this_disk_is_not_told(hub: Hub, load_model, tmp_path):
    model = student(load_model)
    apply_update(model, random_update(model))
    model.config._name_or_path = "/home/somebody/models/llama"
    folder = npt.save_adapter(model, tmp_path / "adapter", fidelity=FIDELITY)
    npt.push_to_hub(folder, "me/adapter")
    pushed = hub.files["me/adapter"]
    assert not any(b"somebody" in content for content in pushed.values())
    assert json.loads(pushed[CONFIG_NAME])["base_model_name_or_path"] == "llama"
    assert b"base_model:" not in pushed[CARD_NAME]
    row = "| student | 0.0500 | 86.0% | - | 11.500 | 1.0500 ± 0.0030 |"
    assert row in pushed[CARD_NAME].decode()
    assert b"/home/somebody" in (folder / CONFIG_NAME).read_bytes()


class TestRefused:
    @pytest.mark.parametrize(
        ("how", "load", "message"),
        [
            ("no repository", True, r"no folder me/adapter, and .* RepositoryNotFoundError: "),
            ("no right", False, "be pushed to me/adapter: HfHubHTTPError: .*403.*auth login"),
            ("offline", True, "me/adapter.*; check the name, the revision, the network"),
            ("offline", False, "be pushed to me/adapter: .*the network"),
            ("no network", True, "me/adapter.*; check the name, the revision, the network"),
            ("no network", False, "be pushed to me/adapter: .*the network"),
        ],
    )
    def test_whatever_the_hub_answers_is_one_line(
        self, hub, folder, load_model, monkeypatch, how, load, message
    ):
        hub.refuse = 403 if how == "no right" else hub.refuse
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "offline")
        if how in ("offline", "no network"):
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        model = load_model()
        with pytest.raises(HubError, match=message) as refusal:
            npt.load_adapter(model, "me/adapter") if load else npt.push_to_hub(folder, "me/adapter")
        assert "\n" not in str(refusal.value) and not is_attached(model) and hub.files == {}

    def test_a_poisoned_or_incomplete_adapter_before_anything_is_sent(self, hub, folder):
        (folder / CARD_NAME).unlink()
        # a card is no part of what is computed: it is written anew
        npt.push_to_hub(folder, "me/adapter")
        assert CARD_NAME in hub.files["me/adapter"]
        hub.asked.clear()
        tensors = load_file(folder / WEIGHTS_NAME)
        next(iter(tensors.values()))[0, 0] = float("nan")
        save_file(tensors, folder / WEIGHTS_NAME)
        with pytest.raises(
            AdapterFileError, match="has a non-finite value; the adapter is not pushed"
        ):
            npt.push_to_hub(folder, "me/adapter")
        (folder / WEIGHTS_NAME).unlink()
        with pytest.raises(AdapterFileError, match="not a regular file"):
            npt.push_to_hub(folder, "me/adapter")
        assert not any(method == "POST" for method, _ in hub.asked)

    def test_a_name_that_is_none(self, hub, folder):
        for name in (
            "",
            "adapter",
            "a/b/c",
            "../adapter",
            "me/",
            "me/a b",
            "me/..",
            "/a/b",
            "a/b--c",
        ):
            assert not is_hub_id(name)
            with pytest.raises(ConfigError, match="write USER/NAME"):
                npt.push_to_hub(folder, name)
        assert hub.asked == []


def test_a_folder_on_disk_goes_before_the_hub(hub, folder, load_model, tmp_path, monkeypatch):
    (tmp_path / "me").mkdir()
    folder.rename(tmp_path / "me" / "adapter")
    monkeypatch.chdir(tmp_path)
    npt.load_adapter(load_model(), "me/adapter")
    assert hub.asked == []


def test_the_command_pushes_and_says_where(hub, folder, capsys):
    command = ["push", "--adapter", str(folder), "--repo_id", "me/adapter", "--private", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["commit"].startswith(f"{hub.url}/me/adapter/commit/")
    assert hub.private["me/adapter"]
