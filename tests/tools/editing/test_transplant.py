import pytest
import torch
from token_students import IDS, student

import npt
from npt.adapters.converted import npt_layers
from npt.errors import ConfigError, ModelError

OTHER = [9, 33, 17, 70]


def logits(model, ids=OTHER) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.fixture
def model(load_model):
    return student(load_model)


def test_a_token_given_its_own_modulation_is_left_as_it_was(model):
    before = logits(model)
    with npt.transplanted(model, npt.modulation_of(model, OTHER, 2), 2):
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("position", [0, 2, 3])
def test_the_token_gets_the_others_modulation_those_before_it_do_not(model, position):
    donor, before = npt.modulation_of(model, IDS, 1), logits(model)
    with npt.transplanted(model, donor, position):
        seen = npt.modulation_of(model, OTHER, position)
        after = logits(model)
    for index, layer in npt_layers(model):
        assert torch.equal(seen.codes[index], donor.codes[index])
        for target in layer.npt.config.targets:
            for got, wanted in zip(
                seen.terms[index][target], donor.terms[index][target], strict=True
            ):
                torch.testing.assert_close(got, wanted)  # fp32: products of four and of five tokens
    assert torch.equal(after[:position], before[:position]) and not torch.equal(
        after[position], before[position]
    )
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("position", [1, 3, 5])
def test_generating_with_the_cache_gives_the_same_tokens_as_without(model, position):
    """Also where the token is one of those that are generated."""
    ids = torch.tensor([OTHER])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, **arguments)
    with npt.transplanted(model, npt.modulation_of(model, IDS), position):
        with_cache, without = (
            model.generate(ids, use_cache=cached, **arguments) for cached in (True, False)
        )
    assert torch.equal(with_cache, without) and torch.equal(model.generate(ids, **arguments), plain)


def test_every_row_of_a_batch_gets_it(model):
    donor = npt.modulation_of(model, IDS)
    with torch.no_grad(), npt.transplanted(model, donor, 1):
        together = model(torch.tensor([OTHER, IDS[:4]])).logits
        alone = [logits(model, ids) for ids in (OTHER, IDS[:4])]
    for got, wanted in zip(together, alone, strict=True):
        # logits of order 5, two rows and one in other products
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_result_is_what_a_pass_within_the_context_gives(model):
    result = npt.transplant(model, IDS, OTHER, 1, -1)
    with npt.transplanted(model, npt.modulation_of(model, IDS, 1), 3):
        inside = torch.log_softmax(logits(model)[-1], -1)
    torch.testing.assert_close(result.transplanted, inside)
    torch.testing.assert_close(result.receiver, torch.log_softmax(logits(model)[-1], -1))
    torch.testing.assert_close(result.donor, torch.log_softmax(logits(model, IDS)[-1], -1))
    assert (result.token_from, result.token_to) == (1, 3)
    top = result.top(5)
    for name, tokens in top.items():
        log_p = getattr(result, name)
        assert (
            len(tokens) == 5
            and tokens[0][0] == int(log_p.argmax())
            and [p for _, p in tokens] == sorted((p for _, p in tokens), reverse=True)
        )
    p, q = result.receiver.double(), result.transplanted.double()
    kl = result.divergences()
    assert kl["receiver_to_transplanted"] == pytest.approx(
        float((p.exp() * (p - q)).sum())
    ) and all(v >= 0 for v in kl.values())
    assert len(result.top(10_000)["donor"]) == 128


def test_of_one_text_to_itself_nothing_changes(model):
    kl = npt.transplant(model, IDS, IDS).divergences()
    assert kl == {
        "receiver_to_transplanted": 0.0,
        "donor_to_transplanted": 0.0,
        "donor_to_receiver": 0.0,
    }


def test_what_cannot_be_transplanted_is_refused(model, load_model):
    donor = npt.modulation_of(model, IDS)
    for refused, error, message in (
        (lambda: npt.transplanted(model, donor, -1), ConfigError, "position is -1"),
        (
            lambda: npt.transplanted(student(load_model, rank=4), donor, 0),
            ModelError,
            "rank 8 for layer 1, the model has rank 4",
        ),
        (
            lambda: npt.transplanted(student(load_model, layers="2"), donor, 0),
            ModelError,
            "layer 1, the model has no adapter",
        ),
        (lambda: npt.transplanted(load_model(), donor, 0), ModelError, "no NPT adapters"),
    ):
        with pytest.raises(error, match=message), refused():
            pass
    with (
        npt.transplanted(model, donor, 0),
        pytest.raises(ModelError, match="transplanted already"),
        npt.transplanted(model, donor, 1),
    ):
        pass
    with pytest.raises(ConfigError, match="there is no token 9"):
        npt.transplant(model, IDS, OTHER, -1, 9)
    assert all(layer.npt.recode is None for _, layer in npt_layers(model))
