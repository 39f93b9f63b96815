"""LongRoPE: a document's frequencies are those of its own length, whatever it is batched with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import npt
from npt.base.rotary import lengths
from npt.data.batch import Sample, collate

TRAINED, SHORT, LONG = 16, 9, 40


@pytest.fixture
def folder(load_model, llama_folder: Path, tmp_path: Path) -> Path:
    """The random Llama, first trained on 16 positions and then stretched to 128."""
    copy = Path(shutil.copytree(llama_folder, tmp_path / "long"))
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0],
        "original_max_position_embeddings": TRAINED,
    }
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def sample(length: int, seed: int = 0) -> Sample:
    ids = torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed))
    return Sample(str(length), tuple(ids.tolist()))


@torch.no_grad()
def states(model, samples, side: str = "right") -> torch.Tensor:
    batch = collate(samples, side=side)
    output = model(
        batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids
    )
    return [row[mask.bool()] for row, mask in zip(output.logits, batch.attention_mask, strict=True)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("load", ["student", "teacher"])
def test_a_short_row_is_the_same_beside_a_long_one(folder, load, side) -> None:
    name = str(folder)
    base = npt.load_base(name, device="cpu")[0]
    model = base if load == "student" else npt.load_teacher(name, "fp32", device="cpu")
    (alone,) = states(model, [sample(SHORT)], side)
    beside, other = states(model, [sample(SHORT), sample(LONG)], side)
    torch.testing.assert_close(beside, alone)
    torch.testing.assert_close(other, states(model, [sample(LONG)], side)[0])


@torch.no_grad()
@pytest.mark.parametrize("length", [SHORT, TRAINED, TRAINED + 1, LONG])
def test_a_row_alone_is_what_transformers_gives(folder, length) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model, _ = npt.load_base(str(folder), device="cpu")
    ids = torch.tensor([sample(length).input_ids])
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits)


def test_packed_documents_have_lengths_of_their_own() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 0, 0, 1, 2, 3, 3]])
    assert lengths(positions).tolist() == [[3, 3, 3, 2, 2, 1, 1], [1, 1, 4, 4, 4, 4, 4]]
    assert lengths(torch.tensor([[41], [3]])).tolist() == [[42], [4]]  # a token after cached ones
