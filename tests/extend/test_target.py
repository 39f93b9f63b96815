"""A target of one's own, as docs/extend/target.md prints it: applied to a copy of the package."""

import sys
from pathlib import Path

import torch
from forked import Forked
from page_changes import changed_package
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extend" / "target.md"


def train_in(folder: Path) -> None:
    """Import the package below a folder, train its new target for a step, save and load it."""
    for name in [name for name in sys.modules if name.split(".")[0] == "npt"]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    import npt
    from npt.adapters.converted import adapter_parameters
    from npt.batch import batch_from_tensors
    from npt.distill.step import forward_backward
    from npt.distill.strategies import drive

    assert Path(npt.__file__).is_relative_to(folder)

    def student() -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).eval()
        npt.attach(model, npt.NPTConfig(rank=2, layers="all", targets=("activation", "down")))
        return model

    assert npt.NPTConfig().targets == ("stream", "gate", "up", "down")  # as without the page
    model = student()
    ids = torch.arange(3, 27).view(2, 12)
    batch = batch_from_tensors(ids, torch.ones_like(ids))
    forward_backward(model, drive, batch, npt.TrainConfig())
    own = {n: p for n, p in adapter_parameters(model).items() if "activation" in n}
    assert len(own) == 2 * 2  # M and B of either layer
    for name, parameter in own.items():
        assert parameter.shape == (64, 2) and parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().max() > 0, name
    with torch.no_grad():
        before = model(ids).logits
        for parameter in own.values():
            parameter.add_(0.5)
        after = model(ids).logits
    assert not torch.equal(before, after)
    npt.save_adapter(model, folder / "adapter")
    other = student()
    npt.load_adapter(other, folder / "adapter")
    with torch.no_grad():
        assert torch.equal(other(ids).logits, after)


def test_a_target_of_ones_own_takes_two_files_and_trains(tmp_path: Path) -> None:
    assert changed_package(PAGE, tmp_path) == ["npt/config/adapter.py", "npt/adapters/layer.py"]
    log = tmp_path / "log"
    status = Forked(lambda: train_in(tmp_path), log).wait()
    assert status == 0, log.read_text()


def test_every_linear_product_of_the_mlp_is_a_target_already() -> None:
    from npt.base.families import LAYER_PARTS
    from npt.config import PRODUCTS

    linear = {name for name in LAYER_PARTS if name.startswith("mlp.")}
    assert linear - {"mlp.act_fn"} == {target.module for target in PRODUCTS.values()}
