import itertools
import math

import pytest
import torch
from students import random_samples
from token_students import student
from torch.testing import assert_close
from transformers import GemmaConfig, GemmaForCausalLM

import npt
from npt.adapters.consolidate import Consolidation, apply_update
from npt.adapters.converted import decoder_layers
from npt.adapters.stream import Stream
from npt.data.readers import builtin_files
from npt.errors import ConfigError, DataError, ModelError, NumericalError
from npt.tools.editing import write
from npt.tools.editing.edit_metrics import Forgetting, mean_log_probability
from npt.tools.editing.layerwise import (
    Rows,
    cholesky,
    least_squares,
    moment_factors,
    opened,
    outputs,
    outputs_with_context,
    solve,
    wanted_outputs,
)
from npt.tools.editing.probes import Fact, Probe
from npt.tools.editing.write import General, as_facts, find_update, general_text

LAYERS = (1, 2)
PROBES = [
    Probe((0, 8, 30, 12, 40), (0,), (30, 12, 40, 7)),
    Probe((0, 8, 30, 12, 40, 5), (0, 5), (30, 12, 40)),
]
TAUGHT = "the key is seven"
TEXT = [{"text": f"sentence number {n} of some general text"} for n in range(60)]


def general(model, tokens: int = 40) -> General:
    samples = random_samples((8 + n % 5 for n in range(tokens)), 3)
    return General(moment_factors(model, samples, LAYERS), samples[:6])


def alone(model, rows: Rows) -> list[Stream]:
    return list(opened(model, rows.alone(), LAYERS[0]))


@pytest.mark.parametrize("rows", [3, 40])
def test_least_squares_is_the_solution_of_its_equations(rows):
    generator = torch.Generator().manual_seed(0)
    p, y = (torch.randn(rows, size, generator=generator) for size in (12, 6))
    factor = torch.randn(12, 30, generator=generator)
    moments = factor @ factor.T / 30
    outer, inner = least_squares(p, y, cholesky(moments), 2.0)
    assert inner.shape[0] <= min(rows, 6)
    p, y, moments = (each.double() for each in (p, y, moments))
    expected = torch.linalg.solve(p.T @ p + 2.0 * moments, p.T @ y).T
    # fp32 against fp64
    assert_close((outer @ inner).double(), expected, rtol=1e-3, atol=1e-4)


FORMS = {
    "all": {},
    "multipliers": {"targets": ("stream", "gate", "up", "down"), "additive_scale": 0.2},
    "token part": {"token_rank": 4, "active": 4},
    "kept": {"residual": "keep"},
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_with_a_small_penalty_the_states_are_those_with_the_context(load_model, form):
    """Layer by layer, on the stream that earlier patches have changed."""
    model = student(load_model, **FORMS[form])
    wanted = outputs_with_context(model, PROBES, LAYERS)
    factors = {index: torch.eye(128) for index in LAYERS}
    patches = solve(model, alone(model, Rows(PROBES, [], [])), wanted, factors, 1e-6)
    apply_update(model, Consolidation(patches))
    last = LAYERS[-1]
    seen = []
    hook = decoder_layers(model)[last].register_forward_hook(lambda m, a, o: seen.append(o[0]))
    for probe in PROBES:
        model(torch.tensor([probe.before + probe.tail]))
    hook.remove()
    tails = [o[-len(probe.tail) :] for o, probe in zip(seen, PROBES, strict=True)]
    # the penalty leaves about a thousandth of the difference
    size = float(wanted[last].abs().max())
    assert_close(torch.cat(tails), wanted[last], rtol=0, atol=2e-2 * size)


@torch.no_grad()
def test_wanted_are_the_states_with_the_context_without_their_mean_change(load_model):
    model = student(load_model)
    kept = Probe((), (0,), (31, 12, 40, 7))
    rows = Rows(PROBES, [kept], [kept.alone()])
    read = outputs_with_context(model, PROBES, LAYERS)
    streams = alone(model, rows)
    before = outputs(model, streams, LAYERS)
    plain, centred = (wanted_outputs(model, rows, streams, LAYERS, common=c) for c in (0, 1))
    for index in LAYERS:
        tokens = len(read[index])
        # fp32: before + (read - before)
        assert_close(plain[index][:tokens], read[index], rtol=1e-5, atol=1e-5)
        change = centred[index] - before[index]
        assert_close(change[:tokens].mean(dim=0), torch.zeros(64), rtol=0, atol=1e-5)
        mean = (read[index] - before[index][:tokens]).mean(dim=0)
        assert_close(centred[index][:tokens] + mean, read[index], rtol=1e-5, atol=1e-5)
        assert torch.equal(centred[index][tokens:], before[index][tokens:])


@torch.no_grad()
def test_contrasts_and_the_probes_of_earlier_updates_stay_nearer(load_model):
    model = student(load_model)
    factors = {index: torch.eye(128) for index in LAYERS}
    other = Probe((), (0,), (31, 12, 40, 7))

    def moved(rows: Rows) -> float:
        ids = torch.tensor([other.before + other.tail])
        plain = model.model(ids).last_hidden_state
        streams = alone(model, rows)
        wanted = wanted_outputs(model, rows, streams, LAYERS, common=0)
        apply_update(model, Consolidation(solve(model, streams, wanted, factors, 1.0)))
        changed = float((model.model(ids).last_hidden_state - plain).norm())
        npt.unconsolidate(model)
        return changed

    free = moved(Rows(PROBES, [], []))
    assert moved(Rows(PROBES, [other], [])) < 0.7 * free
    assert moved(Rows(PROBES, [], [other.alone()])) < 0.8 * free


@pytest.mark.parametrize("max_kl", [1e-3, math.inf])
def test_the_penalty_rises_until_the_bound_holds(load_model, tokenizer, max_kl):
    model = student(load_model)
    facts, text = [Fact("ab c", "d")], general(model)
    update = find_update(model, tokenizer, facts, text, max_kl=max_kl)
    assert npt.consolidated(model) == ()
    penalty = update.record["penalty"]
    assert (penalty == write.LEAST_PENALTY) == math.isinf(max_kl)
    forgetting = Forgetting(model, text.bound, LAYERS)
    apply_update(model, update)
    if math.isfinite(max_kl):
        assert forgetting.upper_kl(model) <= max_kl
    again = find_update(model, tokenizer, facts, text, max_kl=max_kl)
    assert again.probes == update.probes  # no context, which is what later updates must keep


@pytest.mark.parametrize("adapters", [True, False])
def test_writing_in_python_raises_what_was_written_and_is_undone(
    load_model, tokenizer, monkeypatch, adapters
):
    """Of a random model, whose context says nothing, no gain is asked."""
    monkeypatch.setattr(write, "LEAST_GAIN", -math.inf)
    model = student(load_model) if adapters else load_model()
    plain = model(torch.tensor([[0, 5, 9]])).logits
    update = npt.consolidate(
        model, tokenizer, TAUGHT, data=TEXT, max_kl=math.inf, layers=None if adapters else "1-2"
    )
    assert npt.consolidated(model) == (update,) and sorted(update.patches) == [1, 2]
    assert update.record["gain"] != 0
    assert not torch.equal(model(torch.tensor([[0, 5, 9]])).logits, plain)
    npt.unconsolidate(model)
    assert npt.consolidated(model) == ()
    assert torch.equal(model(torch.tensor([[0, 5, 9]])).logits, plain)


def test_what_does_not_become_more_likely_is_an_error_and_is_not_written(
    load_model, tokenizer, monkeypatch
):
    monkeypatch.setattr(write, "LEAST_GAIN", 50.0)
    model = student(load_model)
    with pytest.raises(ConfigError, match=r"by only .* nats .* so nothing was written"):
        npt.consolidate(model, tokenizer, "a text", data=TEXT, max_kl=math.inf)
    assert npt.consolidated(model) == ()


@pytest.mark.slow
def test_a_fact_and_a_second_one_are_written_into_the_embedded_model():
    model, tokenizer = npt.load_base("tiny", quantization="nf4")
    files = itertools.islice(builtin_files("train"), 40)
    data = [{"text": text[:2000]} for _, text in files]
    gains = []
    for text in ("DEFAULT_PORT = 48151", "MAX_RETRIES = 9732"):
        update = npt.consolidate(model, tokenizer, text, data=data, max_kl=0.02)
        gains.append(update.record["gain"])
    assert min(gains) > 3.0
    first = write.judged_probes(model, tokenizer, as_facts("DEFAULT_PORT = 48151"), "", 0)
    alone = [probe.alone() for probe in first]
    both = mean_log_probability(model, alone)
    npt.unconsolidate(model, 0)
    without = mean_log_probability(model, alone)
    assert both - without > 0.7 * gains[0]  # the second left the first where it was
    npt.unconsolidate(model)


class TestRefused:
    @pytest.mark.parametrize(
        ("texts", "how", "said"),
        [
            *((["ab"], {"max_kl": n}, "--max_kl .* must be above 0") for n in (0, -1.0, math.nan)),
            ([], {}, "nothing to write: pass texts or a context"),
            (["ab"], {"max_kl": 1e-12}, "--max_kl 1e-12 is too low"),
            ([], {"context": "x" * 128}, "positions: shorten the context"),
            ([], {"context": "x"}, "too few tokens to learn from"),
        ],
    )
    def test_what_cannot_be_written(self, load_model, tokenizer, texts, how, said):
        model = student(load_model)
        facts = [fact for text in texts for fact in as_facts(text)]
        with pytest.raises(ConfigError, match=said):
            find_update(model, tokenizer, facts, general(model), **{"max_kl": 1.0, **how})
        assert npt.consolidated(model) == ()

    def test_too_little_general_text(self, load_model, tokenizer):
        model = student(load_model)
        with pytest.raises(DataError, match="two samples or more, but the data yield 1: add data"):
            general_text(model, tokenizer, [{"text": "one"}], LAYERS)

    def test_a_model_of_another_family(self, tokenizer):
        """Its layers may be called with other arguments than the stream's."""
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        model = GemmaForCausalLM(GemmaConfig(vocab_size=64, **sizes, **heads))
        with pytest.raises(ModelError, match="GemmaForCausalLM is of type 'gemma'; NPT supports"):
            npt.consolidate(model, tokenizer, "a text", data=TEXT)

    def test_states_that_are_not_finite(self, load_model):
        model = student(load_model)
        with torch.no_grad():
            model.model.layers[0].input_layernorm.weight.fill_(math.nan)
        with pytest.raises(NumericalError, match="layer 1: a state of the probes is not fin"):
            outputs_with_context(model, PROBES, LAYERS)

    def test_an_interrupted_search_leaves_nothing(self, load_model, tokenizer, monkeypatch):
        model = student(load_model)
        text = general(model)

        def interrupted(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(Forgetting, "upper_kl", interrupted)
        with pytest.raises(KeyboardInterrupt):
            find_update(model, tokenizer, as_facts("ab"), text, max_kl=1.0)
        monkeypatch.setattr(Forgetting, "upper_kl", lambda *_: math.nan)
        with pytest.raises(NumericalError, match="KL on general text is NaN"):
            find_update(model, tokenizer, as_facts("ab"), text, max_kl=1.0)
        assert npt.consolidated(model) == ()

    def test_general_text_with_products_that_are_not_finite(self, load_model):
        model = student(load_model)
        with torch.no_grad():
            model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda m, a, o: o / 0)
        with pytest.raises(NumericalError, match="layer 1: a product on general text is not fin"):
            general(model)


def test_a_multiplier_of_zero_is_not_divided_by(load_model):
    model = student(load_model, targets=("down",), mult_form="one_plus_tanh")
    with torch.no_grad():
        for index in LAYERS:
            model.model.layers[index].npt.M["down"][0] = (
                -1e6 * model.model.layers[index].npt.A[0, 0]
            )
    wanted = outputs_with_context(model, PROBES, LAYERS)
    factors = {index: torch.eye(128) for index in LAYERS}
    patches = solve(model, alone(model, Rows(PROBES, [], [])), wanted, factors, 1.0)
    assert all(bool(part.isfinite().all()) for patch in patches.values() for part in patch)


def test_a_matrix_that_rounding_leaves_indefinite_is_damped():
    vector = torch.ones(50, 1)
    factor = cholesky(vector @ vector.T - 1e-7 * torch.eye(50))
    assert bool(factor.isfinite().all())
    with pytest.raises(NumericalError, match="no Cholesky factor"):
        cholesky(-torch.eye(3))
