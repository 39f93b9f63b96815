"""A micro-batch makes the host wait for no device, whatever its rows, its strategy and its
losses.
"""

from typing import Any

import pytest
import torch
import transformers
from families import save_base
from simulated_cuda import HostWaitError, no_waits, simulated_cuda, to_cuda
from transformers.masking_utils import create_causal_mask

import npt
from npt.base.load import load_base
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.config import TARGETS
from npt.data.packing import pack
from npt.distill.hidden_losses import HIDDEN_LOSSES
from npt.distill.strategies import drive

LENGTHS = (11, 5, 4, 9)


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(str(i), tuple(torch.randint(3, 128, (n,), generator=generator).tolist()))
        for i, n in enumerate(LENGTHS)
    ]


def rows(form: str) -> Batch:
    if form == "packed":
        return collate(pack(samples(), 13), 2)
    if form == "packed, padded":
        return collate(pack(samples(), 13), 2, side="left", length=15)
    if form == "full":
        ids = torch.tensor([samples()[0].input_ids] * 2)
        return batch_from_tensors(ids, torch.ones_like(ids))
    return collate(samples()[:2], 2, side=form)


FORMS = ("full", "right", "left", "packed", "packed, padded")


def step_without_waiting(model: Any, form: str, **settings: Any) -> None:
    config = npt.TrainConfig(**settings)
    with simulated_cuda():
        batch = rows(form).pinned().to(torch.device("cuda"))
        to_cuda(model)
        with no_waits():
            drive(model, batch, config)


def mask_waits(model: Any) -> bool:
    """Return whether transformers' own making of a causal mask waits."""
    with simulated_cuda():
        hidden = torch.zeros(2, 5, model.config.hidden_size, device="cuda")
        try:
            with no_waits():
                create_causal_mask(
                    config=model.config,
                    inputs_embeds=hidden,
                    attention_mask=None,
                    past_key_values=None,
                    position_ids=None,
                )
        except HostWaitError:
            return True
    return False


ADAPTERS: list[dict[str, Any]] = [
    {"targets": ("gate", "up", "down")},
    {"targets": tuple(TARGETS), "active": 2, "token_rank": 3},
    {"targets": tuple(TARGETS), "residual": "keep", "modulation": "multiplicative"},
]

STRATEGIES = ("local", "propagated", "end_to_end")


@pytest.mark.parametrize(
    ("attention", "strategy", "form"),
    [
        *(("sdpa", strategy, form) for strategy in STRATEGIES for form in FORMS),
        *(("eager", "end_to_end", form) for form in FORMS),
    ],
)
def test_no_strategy_waits(load_model, attention, strategy, form) -> None:
    model = load_model(attn_implementation=attention)
    if attention == "eager" and mask_waits(model):
        pytest.skip(
            f"NOT TESTED: the eager mask of transformers {transformers.__version__} itself waits"
            " for the device"
        )
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=2))
    step_without_waiting(model, form, strategy=strategy, regularization_lambda=0.1)


@pytest.mark.parametrize("loss", HIDDEN_LOSSES)
@pytest.mark.parametrize("form", ADAPTERS, ids=lambda form: "+".join(form["targets"]))
def test_what_a_graph_records_waits_for_nothing(load_model, form, loss) -> None:
    """No shape in it depends on values either, which would be a wait."""
    model = load_model("nf4")
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=4, **form))
    step_without_waiting(model, "full", loss=loss, regularization_lambda=0.1)


@pytest.mark.parametrize("loss", ["nmse_update", "direction"])
def test_no_hidden_loss_waits(load_model, loss) -> None:
    model = load_model(None)
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=2))
    step_without_waiting(model, "packed, padded", loss=loss)


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "cross_entropy"])
def test_no_loss_on_the_logits_waits(load_model, loss) -> None:
    model = load_model(None)
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=2))
    step_without_waiting(model, "left", strategy="end_to_end", logit_kl_weight=0.5, logit_loss=loss)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("smollm3, window", form) for form in ("full", "right", "left", "packed, padded")),
        *(
            (family, form)
            for family in ("mistral, window", "qwen3, window")
            for form in ("full", "packed, padded")
        ),
    ],
)
def test_no_window_waits(family, form, tmp_path) -> None:
    model, _ = load_base(str(save_base(family, tmp_path / "base")), device="cpu")
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=2))
    step_without_waiting(model, form)
