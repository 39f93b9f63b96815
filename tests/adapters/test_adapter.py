import itertools

import pytest
import torch

from npt.adapters.layer import NPTAdapter
from npt.config import MODULATIONS, PRODUCTS, TARGETS, NPTConfig

D, F, R = 12, 20, 4
WIDTHS = {"stream": D, "gate": F, "up": F, "down": D}
SUBSETS = [s for n in (1, 2, 3, 4) for s in itertools.combinations(TARGETS, n)]


def make(seed: int = 0, **settings) -> NPTAdapter:
    return NPTAdapter(
        NPTConfig(**{"rank": R, **settings}), D, F, torch.Generator().manual_seed(seed)
    )


def attention() -> torch.Tensor:
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(7))


def product(target: str) -> torch.Tensor:
    return torch.randn(2, 5, WIDTHS[target], generator=torch.Generator().manual_seed(8))


def shaken(adapter: NPTAdapter) -> NPTAdapter:
    """Every parameter away from its start, M among them."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return adapter


@pytest.mark.parametrize("targets", SUBSETS, ids=",".join)
@pytest.mark.parametrize("modulation", MODULATIONS)
def test_holds_exactly_the_parameters_of_its_form(modulation, targets):
    expected = {"A": (R, D)}
    for target in targets:
        if modulation != "multiplicative" or target == "stream":
            expected[f"B.{target}"] = (WIDTHS[target], R)
        if modulation != "additive" and target != "stream":
            expected[f"M.{target}"] = (WIDTHS[target], R)
    found = dict(make(modulation=modulation, targets=targets).named_parameters())
    assert {name: tuple(p.shape) for name, p in found.items()} == expected
    assert all(p.dtype == torch.float32 and p.requires_grad for p in found.values())


def test_start_is_normal_for_A_and_B_and_zero_for_M():
    form = NPTConfig(rank=64, targets=tuple(PRODUCTS))
    adapter = NPTAdapter(form, 512, 1024, torch.Generator().manual_seed(0))
    # 2%: ten standard errors of a standard deviation over 32 thousand draws are below 4%, and these
    # draws are fixed
    assert adapter.A.std().item() == pytest.approx(0.02, rel=0.02)
    for target in PRODUCTS:
        assert adapter.B[target].std().item() == pytest.approx(0.001, rel=0.02)
        assert torch.equal(adapter.M[target], torch.zeros_like(adapter.M[target]))


def test_computes_in_fp32_under_autocast_and_for_16_bit_attention():
    adapter = shaken(make())
    y, a = product("gate"), attention()
    plain = adapter.apply_to("gate", y, adapter.code(a))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = adapter.code(a)
        under = adapter.apply_to("gate", y, z)
    assert z.dtype == torch.float32
    assert all(torch.equal(p, u) for p, u in zip(plain, under, strict=True))
    half = a.to(torch.bfloat16)
    assert torch.equal(adapter.code(half), adapter.code(half.float()))


@pytest.mark.parametrize("residual", ["modulate", "keep"])
@pytest.mark.parametrize("modulation", MODULATIONS)
def test_gradients_at_the_start_are_finite_and_reach_all_that_moves(modulation, residual):
    """Only A does not move in the first step, if all that reads its code is zero (LoRA's B = 0)."""
    adapter = make(modulation=modulation, residual=residual, targets=tuple(PRODUCTS))
    z = adapter.code(attention())
    sum(adapter.apply_to(t, product(t), z)[0].square().sum() for t in PRODUCTS).backward()
    code_is_read = modulation != "multiplicative" and residual == "modulate"
    for name, parameter in adapter.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert bool(parameter.grad.abs().sum() > 0) == (name != "A" or code_is_read), name


CASTS = {
    "half": lambda module: module.half(),
    "to a dtype and a device": lambda module: module.to("cpu", torch.float16),
    "double": lambda module: module.double(),
    "to the like of a tensor": lambda module: module.to(torch.zeros(1, dtype=torch.float16)),
}


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_of_the_model_around_it_changes_no_number(cast):
    adapter = shaken(make())
    adapter.A.grad = torch.full_like(adapter.A, 1 / 3)
    before, gradient = (
        {name: p.clone() for name, p in adapter.named_parameters()},
        adapter.A.grad.clone(),
    )
    around = torch.nn.ModuleDict({"npt": adapter, "base": torch.nn.Linear(2, 2)})
    CASTS[cast](around)
    assert around["base"].weight.dtype != torch.float32
    for name, parameter in adapter.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name]), name
    assert torch.equal(adapter.A.grad, gradient)
