"""Whatever a batch holds goes along wherever it is copied: to a device, in parts, into a
post-mortem and out of it.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stopped_runs import BAD, good, make_trainer, stop
from test_postmortem import situation

import npt
from npt.config import DataConfig, NPTConfig
from npt.data.batch import Batch, Sample, collate
from npt.data.packing import pack
from npt.distill.splitting import MicroBatchSplitter
from npt.errors import BundleError
from npt.manifest import write_manifest
from npt.postmortem.bundle import read_bundle
from npt.postmortem.replay import replay
from npt.postmortem.write import write_postmortem


def packed_rows(count: int = 3) -> list[Sample]:
    documents = [Sample(f"d{i}", tuple(range(3 + i, 6 + 2 * i))) for i in range(2 * count)]
    return pack(documents, 14)[:count]


@pytest.fixture(params=["left", "right"])
def full(request) -> Batch:
    """A batch in which no field has its default. A new field of `Batch` must be given here,
    and is then held to be carried.
    """
    made = replace(collate(packed_rows(), 2, side=request.param), offset=5)
    for field in fields(Batch):
        assert field.default is MISSING or getattr(made, field.name) != field.default, (
            f"give {field.name} a value here"
        )
    return made


def assert_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def test_a_batch_on_its_way_to_a_device_keeps_every_field(full) -> None:
    assert_same(full.to(torch.device("cpu")), full)


def test_a_part_of_a_batch_keeps_every_field(full) -> None:
    """One row each, from which padding is cut away: what is left is what stood there."""
    for row, part in enumerate(MicroBatchSplitter(1).parts(full)):
        columns = full.attention_mask[row].bool()
        for name, tensor in full.row_tensors.items():
            found = part.row_tensors.get(name)
            if found is None:  # one document has no need to be told from others
                assert name == "documents" and not tensor[row].any()
            else:
                assert torch.equal(found, tensor[row : row + 1, columns]), name
        assert (part.sample_ids, part.offset, part.tokens) == (
            full.sample_ids[row : row + 1],
            full.offset,
            int(columns.sum()),
        )


def test_a_postmortem_keeps_every_field(full, load_model, tmp_path) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=2, layers="3"))
    plain = collate([Sample("c", (9, 10, 11))], 2)
    accepted = replace(full, offset=11)
    found = read_bundle(
        write_postmortem(tmp_path, situation(model, [], [plain, full], accepted=[accepted]))
    )
    for read, batch in zip([*found.window, *found.accepted], [plain, full, accepted], strict=True):
        assert_same(read, batch)


# --- packed runs
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed_bundle(poisoned_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in windows of two rows of several documents, one of which overflowed."""
    made = make_trainer(
        poisoned_folder,
        [*good(30), BAD],
        tmp_path_factory.mktemp("packed") / "run",
        data_config=DataConfig(max_length=24, packing=True),
        gradient_accumulation_steps=2,
    )
    return stop(made)


def computed(folder: Path) -> list[tuple[Any, Any]]:
    """Loss and gradient norm of the good micro-batch of the window, as replayed and as the run had
    them.
    """
    found = replay(folder)
    assert found.reproduced and found.same_fault and found.classification == "data"
    recorded = {(*t["sample_ids"],): t for t in found.bundle.said["history"]}
    (trace,) = [trace for trace in found.traces if math.isfinite(trace.loss)]
    assert any("+" in name for name in trace.sample_ids)  # of a packed row
    then = recorded[trace.sample_ids]
    return [(trace.loss, then["loss"]), (trace.grad_norm, then["grad_norm"])]


def test_a_packed_micro_batch_is_replayed_bit_for_bit(packed_bundle) -> None:
    assert all(replayed == then for replayed, then in computed(packed_bundle))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, said: t["0.documents"].add_(30), "0.documents holds numbers outside"),
        (
            lambda t, said: t.update({"0.documents": t["0.documents"][:, :3].clone()}),
            "0.documents is I64",
        ),
        (lambda t, said: said["offsets"].append(3), "offsets"),
        (lambda t, said: said["accepted_offsets"].__setitem__(0, -1), "accepted_offsets"),
        (lambda t, said: said.update(offsets=["a", "b"]), "offsets"),
    ],
)
def test_documents_and_offsets_that_cannot_be_are_refused(
    packed_bundle, tmp_path, change, says
) -> None:
    folder = shutil.copytree(packed_bundle, tmp_path / "step-00000001")
    tensors, said = (
        load_file(folder / "window.safetensors"),
        json.loads((folder / "postmortem.json").read_text()),
    )
    change(tensors, said)
    save_file(tensors, folder / "window.safetensors")
    (folder / "postmortem.json").write_text(json.dumps(said))
    write_manifest(folder)
    with pytest.raises(BundleError, match=says):
        read_bundle(folder)
