"""What only a card shows of a base's identity: NF4 packs alike there, and adapters go from one kind
of device to the other.
"""

from __future__ import annotations

import pytest

import npt
from npt.base.identity import PARTS

pytestmark = pytest.mark.gpu


def test_nf4_of_bf16_has_the_codes_of_the_cpu() -> None:
    here, there = (
        npt.base_identity(npt.load_base("tiny", quantization="nf4", device=device)[0])
        for device in ("cpu", "cuda")
    )
    assert all(getattr(there, part) == getattr(here, part) for part in PARTS)


def test_an_unquantised_base_is_the_same_to_the_last_bit() -> None:
    here, there = (
        npt.base_hash(npt.load_base("tiny", device=device)[0]) for device in ("cpu", "cuda")
    )
    assert here == there


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize(("one", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_an_adapter_goes_from_one_device_to_the_other(tmp_path, quantization, one, other) -> None:
    model, _ = npt.load_base("tiny", quantization=quantization, device=one)
    npt.attach(model, npt.NPTConfig(rank=4, layers="6,7"))
    folder = npt.save_adapter(model, tmp_path / "adapter")
    elsewhere, _ = npt.load_base("tiny", quantization=quantization, device=other)
    npt.load_adapter(elsewhere, folder)


def test_hashing_brings_little_more_than_a_chunk_to_the_host(monkeypatch) -> None:
    from npt.base import identity

    model, _ = npt.load_base("tiny", quantization="nf4", device="cuda")
    expected = npt.base_identity(model)
    monkeypatch.setattr(identity, "CHUNK", 1000)
    assert npt.base_identity(model) == expected
