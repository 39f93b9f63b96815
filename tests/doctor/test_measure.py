"""Measured memory: the peak of live tensors in a call, and the bytes that owners hold."""

import random

import bitsandbytes as bnb
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from npt.doctor.measure import peak_bytes, storage_bytes, tensors_of

MIB = 1 << 20


def block(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4)


def test_the_peak_is_the_highest_sum_of_what_lives_at_once(capfd):
    assert peak_bytes(lambda: None, "cpu") == 0 and capfd.readouterr() == ("", "")
    held = [block(7)]

    def call() -> None:
        held.clear()  # freeing what was there before does not hide what comes
        a = block(3)
        b = block(5)
        del a
        block(2)
        del b
        block(6)

    assert peak_bytes(call, "cpu") == 8 * MIB


def test_scratch_of_an_operation_and_what_backward_allocates_count():
    x = block(4).requires_grad_()
    # forward keeps the results of both; backward makes one gradient besides
    added = peak_bytes(lambda: x.exp().exp().sum().backward(), "cpu")
    assert 12 * MIB <= added < 12 * MIB + 1024  # and the sum itself
    with torch.no_grad():
        added = peak_bytes(lambda: x.exp().exp().sum(), "cpu")
    assert 8 * MIB <= added < 8 * MIB + 1024


@settings(max_examples=3, deadline=None)
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


def test_storages_count_once_and_whole():
    x = torch.zeros(100)
    assert storage_bytes([x, x[:10], x.view(10, 10), x.detach()]) == 400
    assert storage_bytes([x[:10], torch.zeros(50)]) == 600
    none = [torch.zeros(0), torch.zeros(9, device="meta"), torch.eye(3).to_sparse()]
    assert storage_bytes(none) == 0


def test_owners_give_up_all_their_tensors_once():
    layer = nn.Linear(10, 10)
    layer.register_buffer("table", torch.zeros(7))
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    weights = 4 * 110
    assert storage_bytes(tensors_of(layer)) == weights + 28
    layer(torch.ones(1, 10)).sum().backward()
    assert storage_bytes(tensors_of(layer)) == 2 * weights + 28
    optimizer.step()
    counters = 2 * 4  # fused AdamW counts the steps of each parameter
    ring: list = [layer, {"again": optimizer}, (layer,)]
    ring.append(ring)
    assert storage_bytes(tensors_of(ring)) == 4 * weights + 28 + counters


def test_a_packed_weight_comes_with_its_statistics(load_model):
    model = load_model()
    packed = model.model.layers[0].mlp.gate_proj.weight
    state = packed.quant_state
    held = [packed, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    assert {t.data_ptr() for t in held} <= {t.data_ptr() for t in tensors_of(model)}
    # half a byte a number, a byte of scale for 64 of them, whose own scales and two tables come on
    # top
    least = packed.numel() + packed.numel() // 32
    assert least < storage_bytes(tensors_of(packed)) < packed.numel() * 1.05 + 4096
