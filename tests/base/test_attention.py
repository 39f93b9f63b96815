"""Attention of fp32 on CUDA: the kernel it reaches, its values and gradients, and what it leaves to
transformers.

A substitute takes the memory-efficient kernel's place: plain products on the CPU, with the
arguments and layouts of torch's operators, which are checked. tests/gpu has the kernel itself.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_cuda import simulated_cuda, to_cuda
from students import enlarge
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import npt
from npt.adapters.converted import adapter_parameters
from npt.base import attention
from npt.base.attention import (
    EXACT,
    SDPA,
    attention_name,
    repeats_exactly,
    sdpa_attention,
    set_deterministic,
)
from npt.base.identity import base_hash
from npt.base.precision import LARGEST_ERROR, fp32_products, matmul_precision
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.config import ATTENTIONS, BaseConfig
from npt.data.packing import pack
from npt.distill.strategies import drive
from npt.errors import ConfigError
from random_base import random_base

HEADS, GROUPS, WIDTH = 4, 2, 16


def scores(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """[B, H, T, S] of [B, H, T, d] and [B, H, S, d]."""
    found = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        found = found.masked_fill(torch.ones(found.shape[-2:]).tril().logical_not(), -torch.inf)
    return found if bias is None else found + bias


def forward(query, key, value, bias, log_sumexp, dropout=0.0, is_causal=False, *, scale=None):
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert log_sumexp and dropout == 0
    if bias is not None:
        assert (
            not is_causal
            and bias.shape == (*query.shape[:3], key.shape[2])
            and bias.dtype == query.dtype
        )
        # else torch's kernel refuses it
        assert bias.stride(-1) == 1 and all(bias.stride(i) % 8 == 0 for i in range(3))
    s = scores(query, key, bias, is_causal, scale)
    padded = nn.functional.pad(s.logsumexp(-1), (0, -s.shape[2] % 32), value=torch.inf)
    nothing = torch.zeros((), dtype=torch.int64)
    output = (s.softmax(-1) @ value).transpose(1, 2).contiguous().transpose(1, 2)
    return output, padded, nothing, nothing.clone()


def backward(grad, query, key, value, bias, out, *rest, **more):
    """Of [B, T, H, d] all, as the operator has them, the bias and the log-sum-exp apart."""
    cu_q, cu_k, max_q, max_k, lse, dropout, _, _, mask_type, bias_grad = rest
    assert (cu_q, cu_k, dropout, bias_grad) == (None, None, 0.0, False) and mask_type in (0, 1)
    assert (max_q, max_k) == (query.shape[1], key.shape[1])
    assert grad.shape == out.shape == query.shape
    grad, query, key, value, out = (x.transpose(1, 2) for x in (grad, query, key, value, out))
    scale = query.shape[-1] ** -0.5 if more.get("scale") is None else more["scale"]
    p = (scores(query, key, bias, mask_type == 1, scale) - lse[:, :, :max_q, None]).exp()
    ds = p * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    found = ds @ key, ds.transpose(-1, -2) @ query, p.transpose(-1, -2) @ grad
    return (*(x.transpose(1, 2).contiguous() for x in found), torch.empty(()))


@pytest.fixture
def kernel(monkeypatch) -> Iterator[list[str]]:
    """Take the substitute for fp32 on the CPU and simulated devices; yield the calls in order."""
    calls: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            calls.append("exact " * (named.pop("num_splits_key", None) == 1) + name)
            return function(*arguments, **named)

        return called

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_efficient_attention", noted("forward", forward))
    library.impl("_efficient_attention_backward", noted("backward", backward))
    monkeypatch.setattr(
        attention,
        "_on_cuda_in_fp32",
        lambda *tensors: all(t.dtype == torch.float32 for t in tensors),
    )
    monkeypatch.setattr(attention, "_has_backward", lambda query, causal: True)
    yield calls
    library._destroy()


LAYER = SimpleNamespace(num_key_value_groups=GROUPS, is_causal=True)


def tensors(length: int, rows: int = 2, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(rows, length, n, WIDTH) for n in (HEADS, HEADS // GROUPS, HEADS // GROUPS)]
    return [
        torch.randn(shape, generator=generator).transpose(1, 2).detach().requires_grad_(grad)
        for shape in shapes
    ]


def padded_mask(length: int, left: bool) -> Tensor:
    """[2, 1, T, T]: the second row has three tokens less."""
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, :3] = not left
    valid[1, -3:] = left
    return torch.ones(length, length, dtype=torch.bool).tril() & valid[:, None, None]


@pytest.mark.parametrize("length", [8, 13])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("mask", ["none", "right", "left", "added"])
@pytest.mark.parametrize("name", [SDPA, EXACT])
def test_values_and_gradients_are_those_of_transformers(kernel, length, scaling, mask, name):
    given = {
        "none": None,
        "right": padded_mask(length, False),
        "left": padded_mask(length, True),
        "added": torch.where(padded_mask(length, False), 0.0, torch.finfo(torch.float32).min / 2),
    }[mask]
    ours, theirs = tensors(length), tensors(length)
    weight = torch.randn(2, length, HEADS, WIDTH)
    if mask == "left":
        weight[1, :3] = 0  # padding that sees no key, of which nobody reads the output
    results = []
    by_name = AttentionInterface().get_interface(name, None)
    for function, (q, k, v) in ((by_name, ours), (sdpa_attention_forward, theirs)):
        output, _ = function(LAYER, q, k, v, given, scaling=scaling)
        torch.where(weight == 0, 0.0, output * weight).sum().backward()
        results.append(output)
    seen = (weight != 0).any(-1).any(-1)
    # default tolerance of fp32: the same sums in another order
    assert_close(results[0][seen], results[1][seen])
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one.grad, other.grad)
    assert kernel == ["forward", "exact backward" if name == EXACT else "backward"]


def test_a_query_without_keys_gives_numbers_and_no_gradient(kernel) -> None:
    q, k, v = tensors(13)
    output, _ = sdpa_attention(LAYER, q, k, v, padded_mask(13, True))
    assert output.isfinite().all()
    output[:, 3:].sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[1, :, :3].any() and not k.grad[1, :, :3].any() and not v.grad[1, :, :3].any()


def test_the_gradient_is_that_of_finite_differences(kernel, monkeypatch) -> None:
    monkeypatch.setattr(attention, "_on_cuda_in_fp32", lambda *tensors: True)
    inputs = [x.detach().double().requires_grad_() for x in tensors(5, rows=2)]
    mask = padded_mask(5, False)
    for given in (None, mask):  # fast: along one random direction, not along every one
        assert torch.autograd.gradcheck(
            lambda *qkv, given=given: sdpa_attention(LAYER, *qkv, given)[0],
            inputs,
            atol=1e-6,
            fast_mode=True,
        )


def test_without_gradients_every_query_head_has_its_own_k_and_v(kernel, monkeypatch) -> None:
    """By which torch reaches the memory-efficient kernel; `enable_gqa` in fp32 would leave it the
    math kernel alone.
    """
    seen: list[Any] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        seen.append((key.shape, value.shape, named))
        return scaled_dot_product_attention(query, key, value, **named)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    q, k, v = tensors(13, grad=False)
    output, _ = sdpa_attention(LAYER, q, k, v, None)
    ((key, value, named),) = seen
    assert key == value == q.shape and "enable_gqa" not in named and named["is_causal"] is True
    assert_close(output, sdpa_attention_forward(LAYER, q, k, v, None)[0])
    assert kernel == []


def test_backward_keeps_one_k_and_v_per_key_head(kernel) -> None:
    sizes = []
    for length in (32, 64):
        q, k, v = tensors(length)
        mask = padded_mask(length, False)
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.append(x) or x, lambda x: x
        ):
            sdpa_attention(LAYER, q, k, v, mask)
        assert any(x is mask or x.data_ptr() == mask.data_ptr() for x in saved)
        others = [x for x in saved if x.dtype == torch.float32]
        assert sorted(x.numel() for x in others)[1:] == sorted(
            (k.numel(), v.numel(), q.numel(), q.numel())
        )
        sizes.append(sum(x.numel() for x in others))
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize("case", ["fp16", "one token", "more keys than queries", "dropout"])
def test_all_else_goes_to_transformers_function_as_it_came(kernel, monkeypatch, case) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        attention,
        "sdpa_attention_forward",
        lambda *arguments, **named: calls.append((arguments, named)) or "theirs",
    )
    q, k, v = tensors(8)
    named: dict[str, Any] = {"dropout": 0.0, "scaling": 0.5, "is_causal": None}
    if case == "fp16":
        q, k, v = (x.half() for x in (q, k, v))
    elif case == "one token":
        q = q[:, :, -1:]
    elif case == "more keys than queries":
        q = q[:, :, -3:]
    else:
        named["dropout"] = 0.1
    assert sdpa_attention(LAYER, q, k, v, None, **named) == "theirs"
    ((arguments, found),) = calls
    assert (
        arguments[0] is LAYER
        and all(x is y for x, y in zip(arguments[1:4], (q, k, v), strict=True))
        and arguments[4] is None
    )
    assert found == named


def test_on_the_cpu_a_base_computes_what_transformers_sdpa_does(load_model, batch) -> None:
    model = load_model()
    assert model.config._attn_implementation == SDPA
    found = []
    for name in (SDPA, "sdpa"):
        model.config._attn_implementation = name
        for mask in (None, batch.attention_mask):
            found.append(model(batch.input_ids, attention_mask=mask).logits)
    # no tolerance: the same function
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("strategy", ["local", "propagated", "end_to_end"])
@pytest.mark.parametrize("form", ["full", "padded", "packed"])
def test_a_strategy_on_a_simulated_device_has_the_cpus_gradients(
    kernel, load_model, strategy, form
) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=4))
    enlarge(model, a=15, b=300)
    given = rows(form)
    config = npt.TrainConfig(strategy=strategy)
    model.config._attn_implementation = "sdpa"
    drive(model, given, config)
    expected = [p.grad.clone() for p in adapter_parameters(model).values()]
    model.config._attn_implementation = SDPA
    model.zero_grad()
    with simulated_cuda() as simulation:
        drive(to_cuda(model), given.to(torch.device("cuda")), config)
        found = [p.grad.cpu() for p in adapter_parameters(model).values()]
    for one, other in zip(found, expected, strict=True):
        # sums in another order through four layers, of 4-bit products
        assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert "math" not in simulation.kernels
    # of the second converted layer
    assert kernel == ([] if strategy != "end_to_end" else ["forward", "backward"])


@pytest.mark.parametrize("name", [SDPA, "sdpa"])
def test_only_the_repeated_heads_reach_a_kernel_of_linear_memory(load_model, name) -> None:
    """Gradients go through torch's own kernel if it tells of none whose splits can be set."""
    model = load_model()
    npt.attach(model, npt.NPTConfig(layers="1-2", rank=4))
    enlarge(model, a=15, b=300)
    model.config._attn_implementation = name
    with simulated_cuda() as simulation:
        drive(
            to_cuda(model),
            rows("full").to(torch.device("cuda")),
            npt.TrainConfig(strategy="end_to_end"),
        )
    assert set(simulation.kernels) == {"efficient" if name == SDPA else "math"}


def rows(form: str) -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = [tuple(torch.randint(3, 128, (n,), generator=generator).tolist()) for n in (11, 5, 4, 9)]
    if form == "packed":
        return collate(pack([Sample(str(i), row) for i, row in enumerate(ids)], 13), 2)
    if form == "padded":
        return collate([Sample(str(i), row) for i, row in enumerate(ids[:2])], 2, side="left")
    full = torch.tensor([ids[0], ids[0][::-1]])
    return batch_from_tensors(full, torch.ones_like(full))


def test_the_name_is_in_no_file_and_no_hash(load_model, tmp_path) -> None:
    model, other = load_model(None), load_model(None, attn_implementation="eager")
    assert base_hash(model) == base_hash(other)
    model.save_pretrained(tmp_path / "base")
    npt.attach(model, npt.NPTConfig(layers="1", rank=2))
    npt.save_adapter(model, tmp_path / "adapter")
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".json", ".md")]
    assert len(files) > 2 and not any(SDPA in path.read_text() for path in files)
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "base").config._attn_implementation
        == "sdpa"
    )


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_base_is_loaded_with_the_attention_that_was_asked_for(load_model, name) -> None:
    model = load_model(None, attn_implementation=name)
    assert attention_name(model) == name
    assert model.config._attn_implementation == (SDPA if name == "sdpa" else name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("flash_attention_2", "flash attention does not support fp32"),
        ("kernels-community/vllm-flash-attn3", "flash attention"),
        ("fast", "'fast'"),
    ],
)
def test_an_attention_that_cannot_work_is_refused_in_one_line(load_model, name, says) -> None:
    for refused in (
        lambda: load_model(None, attn_implementation=name),
        lambda: BaseConfig(attn_implementation=name),
        lambda: npt.load_teacher("tiny", "fp32", device="cpu", attn_implementation=name),
        lambda: random_base(
            load_model(None).config, quantization=None, device="cpu", attn_implementation=name
        ),
    ):
        with pytest.raises(ConfigError, match=says) as raised:
            refused()
        assert "--attn_implementation" in str(raised.value) and "sdpa, eager" in str(raised.value)
        assert "\n" not in str(raised.value)


def test_which_backward_repeats_its_bits(load_model) -> None:
    model, half = load_model(), load_model(None, use_fp16=True)

    def of(model: Any, name: str) -> bool:
        model.config._attn_implementation = name
        return repeats_exactly(model)

    names = (EXACT, SDPA, "sdpa", "eager")
    assert [of(model, name) for name in names] == [True, True, True, True]
    with simulated_cuda():
        to_cuda(model), to_cuda(half)
        assert [of(model, name) for name in names] == [True, False, False, True]
        assert [of(half, name) for name in (EXACT, "eager")] == [False, True]
        for name, found in (("eager", True), (SDPA, True), (EXACT, True)):
            model.config._attn_implementation = name
            set_deterministic(model, True)
            assert repeats_exactly(model) is found and attention_name(model) in ATTENTIONS
            set_deterministic(model, False)
            assert repeats_exactly(model) is (name == "eager")


@torch.no_grad()
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_backward_operands_of_tf32_are_those_of_fp16(monkeypatch, size, causal) -> None:
    monkeypatch.setattr(attention, "_on_cuda_in_fp32", lambda *tensors: True)
    monkeypatch.setattr(attention, "_takes_fp16", lambda *_: matmul_precision() != "highest")
    q, k, v = tensors(64, grad=False)
    v *= size
    exact = sdpa_attention_forward(
        LAYER, q.double(), k.double(), v.double(), None, is_causal=causal
    )
    errors = []
    for precision in ("highest", "high"):
        with fp32_products(precision):
            output, _ = sdpa_attention(LAYER, q, k, v, None, is_causal=causal)
        assert output.dtype == torch.float32
        difference = torch.linalg.vector_norm(output.double() - exact[0])
        errors.append(float(difference / max(torch.linalg.vector_norm(exact[0]), 1e-300)))
    assert errors[0] < 1e-6 and (1e-4 if size else 0) <= errors[1] < LARGEST_ERROR
    with fp32_products("high"):  # a mask, which flash kernels take none of
        assert torch.equal(
            sdpa_attention(LAYER, q, k, v, padded_mask(64, False))[0],
            sdpa_attention_forward(LAYER, q, k, v, padded_mask(64, False))[0],
        )


@torch.no_grad()
@pytest.mark.parametrize("bad", [7e4, -7e4, torch.inf, torch.nan])
@pytest.mark.parametrize("operand", [0, 1])
def test_a_query_or_key_beyond_fp16_is_not_lost_in_silence(monkeypatch, bad, operand) -> None:
    monkeypatch.setattr(attention, "_on_cuda_in_fp32", lambda *tensors: True)
    monkeypatch.setattr(attention, "_takes_fp16", lambda *_: True)
    inputs = tensors(16, grad=False)
    expected = sdpa_attention(LAYER, *inputs, None)[0]
    assert expected.isfinite().all() and len(expected) > 1
    inputs[operand][0, 1, 5, 3] = bad
    inputs[2][0] *= 1e3
    found = sdpa_attention(LAYER, *inputs, None)[0]
    assert found[0].isnan().all() and torch.equal(found[1:], expected[1:])
