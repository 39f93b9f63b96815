import os
import random
import subprocess
import sys
from types import SimpleNamespace

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import npt
from npt.data.batch import batch_from_tensors
from npt.distill.strategies import STRATEGIES
from npt.planning.measure import peak_bytes, storage_bytes, tensors_of

MIB = 1 << 20


def block(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def test_the_peak_is_the_highest_sum_of_what_lives_at_once():
    def call() -> None:
        a = block(3)
        b = block(5)
        del a
        block(2)
        del b
        block(6)

    assert peak_bytes(call, "cpu") == 8 * MIB


def test_the_scratch_of_one_operation_counts():
    x = block(4)
    # and the sum itself
    assert peak_bytes(lambda: (x + 1).exp().sum(), "cpu") in range(8 * MIB, 8 * MIB + 1024)


def test_what_backward_allocates_counts():
    x = block(4).requires_grad_()
    # Forward keeps the results of both; backward makes one gradient besides, and frees each
    # result once it is used.
    added = peak_bytes(lambda: x.exp().exp().sum().backward(), "cpu")
    assert 12 * MIB <= added < 12 * MIB + 1024  # and the sum itself
    with torch.no_grad():
        added = peak_bytes(lambda: x.exp().exp().sum(), "cpu")
    assert 8 * MIB <= added < 8 * MIB + 1024


def test_a_call_without_tensors_adds_nothing_and_says_nothing(capfd):
    assert peak_bytes(lambda: None, "cpu") == 0
    assert capfd.readouterr() == ("", "")


def test_earlier_memory_is_not_added():
    held = block(7)
    assert peak_bytes(lambda: block(2), "cpu") == 2 * MIB
    del held


def test_freeing_what_was_there_before_does_not_hide_what_comes():
    held = [block(7)]

    def call() -> None:
        held.clear()
        block(2)

    assert peak_bytes(call, "cpu") == 2 * MIB


def test_what_the_first_call_left_and_the_second_frees_is_no_gain():
    kept: list[torch.Tensor] = []
    assert peak_bytes(lambda: kept.append(block(3)), "cpu") == 3 * MIB

    def call() -> None:
        kept.clear()
        block(1)
        block(2)

    assert peak_bytes(call, "cpu") == 2 * MIB


def test_an_error_comes_through_and_the_next_measurement_works():
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0, "cpu")
    assert peak_bytes(lambda: block(1), "cpu") == MIB


FIRST = """
import gc, os, sys
from pathlib import Path

import npt.planning.measure, torch

assert "bitsandbytes" in sys.modules

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

def call():
    a, b = torch.ones(24 << 20), torch.ones(24 << 20)
    del a, b
    torch.ones(32 << 20)

if os.access("/proc/self/clear_refs", os.W_OK):
    npt.planning.measure.peak_bytes(call, "cpu")  # what the profiler itself keeps
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    resident = status("VmRSS")
    added = npt.planning.measure.peak_bytes(call, "cpu")
    Path(sys.argv[1]).write_text(f"{added} {status('VmHWM') - resident}")
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A process of its own: what it says, and by what it grows."""
    grown = tmp_path_factory.mktemp("first") / "grown"
    said = subprocess.run([sys.executable, "-c", FIRST, str(grown)], capture_output=True, text=True)
    return SimpleNamespace(said=said, grown=grown)


def test_an_import_says_nothing(first: SimpleNamespace) -> None:
    """bitsandbytes has something to say at its own on some machines."""
    said = first.said
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(-3, 6).filter(bool), min_size=5, max_size=30), st.integers(0, 1 << 16))
def test_any_order_of_making_and_freeing_is_followed(changes, seed):
    choose = random.Random(seed)
    sums = [0]
    live: list[torch.Tensor] = []

    def call() -> None:
        for change in changes:
            if change > 0:
                live.append(torch.empty(change * 1000, dtype=torch.uint8))
            elif live:
                live.pop(choose.randrange(len(live)))
            sums.append(sum(t.nbytes for t in live))
        live.clear()

    assert peak_bytes(call, "cpu") == max(sums)


def test_a_packed_product_counts_its_dequantised_weight():
    layer = bnb.nn.Linear4bit(
        256, 512, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    ).to("cpu")
    layer.support_avx512bf16_for_cpu = False
    x = torch.randn(4, 256)
    with torch.no_grad():
        layer(x)
        added = peak_bytes(lambda: layer(x), "cpu")
    # The dense weight and the product, and little else: bitsandbytes may keep a second form of
    # it for a moment.
    assert 4 * 512 * 256 + 4 * 4 * 512 <= added <= 3 * 4 * 512 * 256


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="a process cannot reset its high-water mark here",
)
def test_the_process_grows_by_what_was_measured(first: SimpleNamespace) -> None:
    """In a process of its own: one that has freed much before may hold room for a block already,
    and then grows by less.
    """
    added, grown = map(int, first.grown.read_text().split())
    assert added == 192 * MIB
    # Blocks of this size are mapped and unmapped one by one, so that the process follows; the
    # profiler's own records are small.
    assert abs(grown - added) < 8 * MIB


def test_a_training_step_in_4_bit_gives_its_memory_back(load_model, batch):
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=4, layers="all"))

    def step() -> None:
        STRATEGIES["local"](model, batch, npt.TrainConfig())
        model.zero_grad()

    step()
    first, second = peak_bytes(step, "cpu"), peak_bytes(step, "cpu")
    assert first == second > batch.tokens * 64 * 4


def test_storages_count_once_and_whole():
    x = torch.zeros(100)
    assert storage_bytes([x, x[:10], x.view(10, 10), x.detach()]) == 400
    assert storage_bytes([x[:10]]) == 400
    assert storage_bytes([x, torch.zeros(50)]) == 600
    assert (
        storage_bytes([torch.zeros(0), torch.zeros(9, device="meta"), torch.eye(3).to_sparse()])
        == 0
    )


def test_owners_give_up_all_their_tensors():
    layer = nn.Linear(10, 10)
    layer.register_buffer("table", torch.zeros(7))
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    weights = 4 * 110
    assert storage_bytes(tensors_of(layer)) == weights + 28
    layer(torch.ones(1, 10)).sum().backward()
    assert storage_bytes(tensors_of(layer)) == 2 * weights + 28
    optimizer.step()
    counters = 2 * 4  # fused AdamW counts the steps of each parameter
    assert storage_bytes(tensors_of(layer, optimizer)) == 4 * weights + 28 + counters
    assert (
        storage_bytes(tensors_of([layer], {"again": optimizer}, (layer,)))
        == 4 * weights + 28 + counters
    )


def test_a_packed_weight_comes_with_its_statistics(load_model):
    model = load_model()
    packed = model.model.layers[0].mlp.gate_proj.weight
    state = packed.quant_state
    held = [packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    assert {t.data_ptr() for t in held} <= {t.data_ptr() for t in tensors_of(model)}
    # A weight takes half a byte, and a byte of scale for 64 of them, whose own scales and two
    # tables come on top.
    assert (
        packed.numel() + packed.numel() // 32
        < storage_bytes(tensors_of(packed))
        < packed.numel() * 1.05 + 4096
    )


def test_a_batch_gives_its_tensors():
    batch = batch_from_tensors(
        torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    )
    assert batch.scored == 8
    ids = {t.data_ptr() for t in tensors_of(batch)}
    assert {
        batch.input_ids.data_ptr(),
        batch.labels.data_ptr(),
        batch.valid_index.data_ptr(),
        batch.scored_index.data_ptr(),
    } <= ids


def test_a_ring_of_owners_ends():
    ring: list = [torch.zeros(3)]
    ring.append(ring)
    assert storage_bytes(tensors_of(ring)) == 12
