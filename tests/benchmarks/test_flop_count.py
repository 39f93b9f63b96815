"""Counted arithmetic: packed products, products in place, attention and its backward."""

import pytest
import torch
from torch.nn import functional as F

from flop_count import count_flops
from npt.packed import quantized_linears


class TestCount:
    def test_a_packed_product_counts_as_a_dense_one_forward_and_backward(self, load_model):
        _, module = quantized_linears(load_model())[0]
        x = torch.randn(7, module.in_features, requires_grad=True)
        once = 2 * 7 * module.in_features * module.out_features
        with torch.no_grad():
            assert count_flops(lambda: module(x)) == once
        assert count_flops(lambda: module(x).sum().backward()) == 2 * once

    @pytest.mark.parametrize("heads", [1, 4])
    def test_causal_attention_counts_half_and_its_backward_twice(self, heads):
        q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for _ in range(3))
        full = 2 * 2 * heads * 16 * 16 * 16
        for causal, counted in ((False, 3 * full), (True, 3 * full // 2)):

            def step(causal: bool = causal) -> None:
                F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()

            assert count_flops(step) == counted

    @pytest.mark.parametrize("act", [torch.addmm, torch.Tensor.addmm_])
    def test_a_product_that_is_added_counts_in_place_as_well(self, act):
        assert (
            count_flops(lambda: act(torch.ones(3, 5), torch.ones(3, 4), torch.ones(4, 5)))
            == 2 * 3 * 4 * 5
        )

    def test_a_masked_score_matrix_is_computed_and_counted_whole(self):
        q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
        mask = torch.ones(16, 16, dtype=torch.bool).tril()
        assert (
            count_flops(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
            == 2 * 2 * 16 * 16 * 16
        )


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_of_fp32_on_cuda_counts_as_the_cpus(monkeypatch, masked):
    """Causal half of its scores, a mask none of them; backward twice as much. Shapes alone, by
    torch's own functions of them.
    """
    from types import SimpleNamespace

    from torch._subclasses.fake_tensor import FakeTensorMode

    from npt.base import attention

    monkeypatch.setattr(attention, "_on_cuda_in_fp32", lambda *tensors: True)
    monkeypatch.setattr(attention, "_has_backward", lambda query, causal: True)
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    with FakeTensorMode():
        q, k, v = (torch.empty(3, heads, 40, 16, requires_grad=True) for heads in (4, 2, 2))
        mask = torch.ones(3, 1, 40, 40, dtype=torch.bool) if masked else None
        once = 2 * 3 * 4 * 40 * 40 * (16 + 16) // (1 if masked else 2)
        assert (
            count_flops(lambda: attention.sdpa_attention(layer, q, k, v, mask)[0].sum().backward())
            == 3 * once
        )
