"""The token part and the threshold: fitted as their formulas say, and the student they make."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_calibrate import calibrate, kl, samples, student
from test_cut import covariance
from torch import Tensor
from torch.testing import assert_close

import npt
from npt.adapters.converted import adapter_tensors, attached, attached_config, npt_layers
from npt.calibration import threshold
from npt.calibration.cut import Cut
from npt.calibration.threshold import set_apart, student_codes
from npt.calibration.token_part import RIDGE, TokenPart
from npt.config import NPTConfig
from npt.errors import AdapterFileError, ConfigError, DataError, NotSupportedError, NumericalError
from npt.forensics.student import student_entry

D, ROWS = 12, 400


def rows(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """a [N, D], x1 [N, D] and 1 / r^2 [N, 1], with a part of a that x1 says, and means."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, D, generator=draw, dtype=torch.float64) + 0.5
    said = x @ torch.randn(D, D, generator=draw, dtype=torch.float64)
    a = said + torch.randn(ROWS, D, generator=draw, dtype=torch.float64) - 0.3
    return a, x, torch.rand(ROWS, 1, generator=draw, dtype=torch.float64) + 0.1


def moments(seed: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means over the rows, as `Sensitivity` keeps them."""
    a, x, weight = rows(seed)
    read = torch.cat([x, torch.ones(ROWS, 1, dtype=x.dtype)], dim=1) if rank else x[:, :1] * 0 + 1
    return a.T @ (weight * a) / ROWS, a.T @ (weight * read) / ROWS, read.T @ (weight * read) / ROWS


@pytest.mark.parametrize("rank", [0, 3, D])
def test_the_bias_and_what_is_left_are_those_of_the_rows(rank: int) -> None:
    a, x, weight = rows(1)
    c, cross, inputs = moments(1, rank)
    part = TokenPart.of(cross, inputs, covariance(2), rank)
    rest = part.left(c, cross, cross, inputs)
    own = x @ (part.outer @ part.inner).double().T + part.bias.double()
    left = a - own
    # fp32 results
    assert float((weight * left).sum(dim=0).abs().max()) < 1e-3
    assert_close(left.T @ (weight * left) / ROWS, rest, rtol=1e-4, atol=1e-4)
    assert part.inner.shape == (rank, D) and part.outer.shape == (D, rank)


def test_at_full_rank_it_is_the_weighted_ridge_regression() -> None:
    a, x, weight = rows(3)
    part = TokenPart.of(*moments(3, D)[1:], covariance(4), D)
    mean = (weight * x).sum(dim=0) / weight.sum()
    centred = weight.sqrt() * (x - mean)
    squares = centred.T @ centred
    squares += RIDGE * squares.diagonal().mean() * torch.eye(D, dtype=a.dtype)
    expected = torch.linalg.solve(squares, centred.T @ (weight.sqrt() * a)).T
    assert_close((part.outer @ part.inner).double(), expected, rtol=1e-4, atol=1e-4)


@given(seed=st.integers(0, 50), rank=st.integers(1, D - 1))
def test_no_other_part_of_its_rank_costs_less(seed: int, rank: int) -> None:
    """Up to the ridge."""
    s = covariance(seed + 7)
    moment, cross, inputs = moments(seed, rank)
    part = TokenPart.of(cross, inputs, s, rank)
    rest = part.left(moment, cross, cross, inputs)
    a, x, weight = rows(seed)
    least = float((rest * s).sum())
    draw = torch.Generator().manual_seed(seed)
    for size in (1e-2, 0.3):
        noise = size * torch.randn(part.inner.shape, generator=draw) * part.inner.abs().mean()
        inner = (part.inner + noise).double()
        read = torch.cat([x @ inner.T, torch.ones(ROWS, 1, dtype=x.dtype)], dim=1)
        solved = torch.linalg.lstsq(weight.sqrt() * read, weight.sqrt() * a).solution
        left = weight.sqrt() * (a - read @ solved)
        assert float((left @ s * left).sum()) / ROWS >= least * (1 - 1e-2)


def test_an_error_of_a_number_costs_half_its_square() -> None:
    """In nats, whichever number it is: B'S B = 1."""
    c, s = covariance(5), covariance(6)
    cut = Cut.of(c, s)
    form = NPTConfig(rank=D, active=4, additive_scale=0.5)
    part = TokenPart.of(*moments(5, 0)[1:], s, 0)
    named = Cut(cut.worth, cut.code, cut.back, cut.lost, part).tensors(0, D, form)
    back = form.additive_scale * (named["B.stream"] / named["scale"]).double()
    assert_close(back.T @ s @ back, torch.eye(D, dtype=s.dtype), rtol=1e-3, atol=1e-3)
    code = (named["scale"].unsqueeze(1) * named["A"]).double()
    worth = torch.tensor(cut.worth, dtype=s.dtype)
    assert_close((code @ c @ code.T).diagonal(), worth, rtol=1e-3, atol=1e-6)


# --- the student


FORM = {"rank": 32, "active": 8, "token_rank": 16}


def test_at_every_direction_it_is_its_teacher_whatever_the_token_part(
    load_model: Any, tokenizer: Any
) -> None:
    for token_rank in (5, 64):
        model = student(load_model, rank=64, token_rank=token_rank)
        calibrate(model, tokenizer)
        assert kl(model, tokenizer)[0] < 1e-7
        npt.detach(model)


def test_the_threshold_leaves_the_active_numbers_on_tokens_it_has_not_seen(
    load_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threshold, "TOKENS", 400)
    model = student(load_model, **FORM)
    found = calibrate(model, tokenizer, samples(300), tokens=4000)
    assert found.tokens < 4000 - 350
    fidelity = npt.evaluate(model, tokenizer, samples(60, seed=9), batch_size=16)
    counts = [layer["active"] for layer in fidelity.layers.values()]
    # 8 within the error of a few hundred tokens; the layers differ
    assert 6.5 < sum(counts) / 3 < 9.5 and max(counts) > 1.1 * min(counts)
    tau = npt_layers(model)[0][1].npt.log_tau
    assert all(layer.npt.log_tau is tau for _, layer in npt_layers(model))
    sizes, tokens = student_codes(model, samples(60, seed=9), 16)
    kept = float((sizes >= tau.detach().exp()).sum()) / tokens / 3
    assert kept == pytest.approx(sum(counts) / 3, rel=1e-6)


def test_active_numbers_are_worth_more_than_fixed_ones(load_model: Any, tokenizer: Any) -> None:
    near = {}
    for name, form in {
        "fixed": {"rank": 8},
        "active": {"rank": 48, "active": 8},
        "after a token part": FORM,
    }.items():
        model = student(load_model, **form)
        calibrate(model, tokenizer, samples(200), tokens=3000)
        near[name] = kl(model, tokenizer)[0]
        npt.detach(model)
    assert near["active"] < 0.9 * near["fixed"] and near["after a token part"] < near["active"]


def test_without_context_it_has_the_token_part(load_model: Any, tokenizer: Any) -> None:
    floors = []
    for form in ({"rank": 16}, FORM):
        model = student(load_model, **form)
        calibrate(model, tokenizer, samples(200), tokens=3000)
        floors.append(kl(model, tokenizer)[1])
        npt.detach(model)
    assert floors[1] < 0.8 * floors[0]


def test_a_threshold_that_fails_leaves_the_adapters_as_they_were(
    load_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = student(load_model, **FORM)
    before = {name: tensor.clone() for name, tensor in adapter_tensors(model).items()}
    form = attached_config(model)

    def fails(*_: Any) -> None:
        raise DataError("no")

    monkeypatch.setattr("npt.calibration.calibrate.set_threshold", fails)
    with pytest.raises(DataError):
        calibrate(model, tokenizer)
    assert attached_config(model) == form and attached(model).random_start
    now = adapter_tensors(model)
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], value) for name, value in before.items())


def test_a_token_whose_state_is_0_does_not_make_the_start(load_model: Any, tokenizer: Any) -> None:
    """As after an embedding that was never trained: 1 / r^2 would be its weight."""
    near = []
    for scale in (1.0, 0.0):
        model = student(load_model, layers="0-3", **FORM)
        kept = model.model.embed_tokens.weight.data[40].clone()
        model.model.embed_tokens.weight.data[40] *= scale
        ranks = calibrate(model, tokenizer, samples(200), tokens=3000).layers
        assert min(layer.rank for layer in ranks.values()) > 8
        model.model.embed_tokens.weight.data[40] = kept
        near.append(kl(model, tokenizer)[0])
        npt.detach(model)
    assert near[1] < 1.3 * near[0]


def test_states_that_are_not_finite_are_named(
    load_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from npt.calibration import refit

    original = refit._step

    def spoilt(layer: Any, walk: Any) -> None:
        original(layer, walk)
        walk.stream.hidden[0, 0, 0] = torch.inf

    monkeypatch.setattr(refit, "_step", spoilt)
    model = student(load_model, **FORM)
    with pytest.raises(NumericalError, match="states at layer 2 are not finite"):
        calibrate(model, tokenizer)


def test_a_post_mortem_knows_the_factors(load_model: Any, tokenizer: Any) -> None:
    model = student(load_model, **FORM)
    calibrate(model, tokenizer)
    fixed = student_entry(model, {}, "hash", 1)["fixed"]
    assert list(fixed) == [f"model.layers.{i}.npt.scale" for i in (1, 2, 3)]
    for name, values in fixed.items():
        assert torch.equal(torch.tensor(values), adapter_tensors(model)[name])


@pytest.mark.parametrize(("lengths", "count"), [((8,) * 16, 2), ((100, 4, 4, 4), 3), ((9, 9), 1)])
def test_an_eighth_is_set_apart_for_the_threshold(lengths: tuple[int, ...], count: int) -> None:
    from npt.batch import Sample

    assert set_apart([Sample("s", tuple(range(n))) for n in lengths]) == count


# --- the form


def test_a_number_below_the_threshold_is_0_and_nan_stays(load_model: Any) -> None:
    model = student(load_model, **FORM)
    adapter: Any = npt_layers(model)[0][1].npt
    with torch.no_grad():
        adapter.log_tau.fill_(math.log(0.5))
        adapter.A.copy_(torch.eye(32, 64))
    e = torch.full((3, 64), 0.4)
    e[0, 1], e[1, 2], e[2, 3] = 0.6, -0.7, torch.nan
    z = adapter.code(e)
    assert z[0].nonzero().flatten().tolist() == [1] and float(z[1, 2].detach()) == pytest.approx(
        -0.7
    )
    assert bool(z[2].isnan().any())


def test_gradients_pass_through_active_numbers_and_tau_is_drawn_to_their_count(
    load_model: Any,
) -> None:
    model = student(load_model, **FORM)
    adapter: Any = npt_layers(model)[0][1].npt
    with torch.no_grad():
        adapter.log_tau.fill_(math.log(0.5))
        adapter.A.copy_(torch.eye(32, 64))
    e = torch.zeros(2, 64)
    e[0, :20] = 1.0  # 20 numbers of one token are active, none of the other's
    e.requires_grad_()
    adapter.code(e).sum().backward()
    assert e.grad is not None and e.grad.sum(dim=1).tolist() == [20.0, 0.0]
    # 16 are wanted of two tokens: tau has to grow, so its gradient is negative
    assert adapter.log_tau.grad.item() < 0
    adapter.log_tau.grad = None
    adapter.code(e * 0.1).sum().backward()
    assert adapter.log_tau.grad.item() > 0


def test_a_copy_shares_its_own_threshold(load_model: Any) -> None:
    model = student(load_model, **FORM)
    other = copy.deepcopy(model)
    taus = {id(layer.npt.log_tau) for m in (model, other) for _, layer in npt_layers(m)}
    assert len(taus) == 2


def test_a_saved_student_loads_with_threshold_and_scale(
    load_model: Any, tokenizer: Any, tmp_path: Any
) -> None:
    model = student(load_model, **FORM)
    calibrate(model, tokenizer)
    near = kl(model, tokenizer)
    folder = npt.save_adapter(model, tmp_path / "adapter")
    kept = {name: tensor.clone() for name, tensor in adapter_tensors(model).items()}
    npt.detach(model)
    npt.load_adapter(model, folder)
    found = adapter_tensors(model)
    assert found.keys() == kept.keys() and all(torch.equal(found[n], kept[n]) for n in kept)
    assert [name for name in kept if name.endswith("tau")] == ["model.layers.1.npt.log_tau"]
    assert kl(model, tokenizer) == near


def test_a_file_with_a_factor_of_0_is_refused(load_model: Any, tmp_path: Any) -> None:
    model = student(load_model, **FORM)
    npt_layers(model)[0][1].npt.scale[3] = 0.0
    folder = npt.save_adapter(model, tmp_path / "adapter")
    npt.detach(model)
    with pytest.raises(AdapterFileError, match=r"layers.1.npt.scale has a factor .* not above 0"):
        npt.load_adapter(model, folder)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"active": 17}, "--active is 17, but a code has only 16 numbers"),
        ({"active": 3, "ranks": (2, 2, 3)}, "--active is 3, but a code has only 2.33"),
        ({"token_rank": 65}, "--token_rank is 65, larger than the model's hidden size 64"),
        ({"active": 4, "residual": "keep"}, "--active 4 has no effect without the target stream"),
        ({"token_rank": 4, "targets": ("gate",)}, "--token_rank 4 has no effect without"),
        ({"active": -1}, "--active is -1; it must be at least 0"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_is_refused(load_model: Any, form: Any, said: str) -> None:
    with pytest.raises((ConfigError, NotSupportedError), match=said):
        student(load_model, **form)


def test_the_plain_form_has_no_new_tensor(load_model: Any) -> None:
    names = {name.rpartition(".npt.")[2] for name in adapter_tensors(student(load_model))}
    assert all(name == "A" or name[:2] in ("B.", "M.") for name in names)
