"""`evaluate` against hand computation on the plain model, and that it leaves the model alone."""

import json
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import torch
from students import enlarge, moved, random_samples
from torch import Tensor, nn

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters, npt_layers
from npt.adapters.layer import student_output
from npt.batch import Sample, collate
from npt.config import DataConfig, NPTConfig
from npt.data.packing import pack
from npt.errors import DataError, ModelError, NumericalError
from npt.evaluation import evaluate as evaluate_module
from npt.evaluation import layers as layers_module
from npt.evaluation.evaluate import Fidelity, evaluate
from npt.evaluation.metrics import Figures, mean_and_error
from npt.files import to_json

LENGTHS = (9, 4, 12, 7, 2)
OCTAVES = {"0-1": 1, "2-3": 3, "4-7": 7, "8-15": 15}


def samples(lengths: tuple[int, ...] = LENGTHS) -> list[Sample]:
    return random_samples(lengths)


@pytest.fixture(scope="module")
def student(load_model: Callable[..., nn.Module]) -> nn.Module:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    return moved(model, 0.2)


def assert_same(one: Fidelity, other: Fidelity, rel: float) -> None:
    for name in ("teacher", "floor", "student"):
        # abs: the teacher's KL is 0.
        assert asdict(getattr(one, name)) == pytest.approx(
            asdict(getattr(other, name)), rel=rel, abs=1e-6, nan_ok=True
        ), name
    assert one.layers.keys() == other.layers.keys()
    for index, values in one.layers.items():
        assert values == pytest.approx(other.layers[index], rel=rel, nan_ok=True)


def logits_of(model: nn.Module, sample: Sample) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0].double()


def states_of(base: nn.Module, sample: Sample) -> dict[tuple[int, str], Tensor]:
    """h, a and the output t of layers 1 and 3 of the plain model."""
    seen: dict[tuple[int, str], Tensor] = {}
    handles = []
    for i in (1, 3):
        layer = base.model.layers[i]
        handles.append(
            layer.register_forward_hook(
                lambda _, args, out, i=i: seen.update({(i, "h"): args[0][0], (i, "t"): out[0]})
            )
        )
        handles.append(
            layer.self_attn.register_forward_hook(
                lambda _, __, out, i=i: seen.update({(i, "a"): out[0][0]})
            )
        )
    logits_of(base, sample)
    for handle in handles:
        handle.remove()
    return seen


def test_figures_equal_those_of_single_samples_on_the_plain_model(
    student, load_model, tokenizer
) -> None:
    base = load_model()
    nll = kl = excess = top1 = acceptance = 0.0
    tokens = 0
    for sample in samples():
        log_p, log_q = (
            logits_of(base, sample).log_softmax(-1)[:-1],
            logits_of(student, sample).log_softmax(-1)[:-1],
        )
        for t, target in enumerate(sample.input_ids[1:]):
            nll -= float(log_q[t, target])
            excess += float(log_p[t, target] - log_q[t, target])
            kl += float((log_p[t].exp() * (log_p[t] - log_q[t])).sum())
            top1 += float(log_p[t].argmax() == log_q[t].argmax())
            acceptance += float(torch.minimum(log_p[t], log_q[t]).exp().sum())
            tokens += 1
    found = evaluate(student, tokenizer, samples()).student
    assert found.tokens == tokens == sum(LENGTHS) - len(LENGTHS)
    expected = (
        math.exp(nll / tokens),
        math.exp(excess / tokens),
        kl / tokens,
        top1 / tokens,
        acceptance / tokens,
    )
    # fp32 logits of size 10 from padded rows, against fp64 softmax of unpadded ones.
    assert (
        found.perplexity,
        found.perplexity_ratio,
        found.kl,
        found.top1,
        found.acceptance,
    ) == pytest.approx(expected, rel=1e-4)
    assert found.kl > 0.01  # the comparison is of something


def test_figures_by_position_are_those_of_the_tokens_there(student, load_model, tokenizer) -> None:
    base, expected = load_model(), {}
    for sample in samples():
        log_p, log_q = (logits_of(m, sample).log_softmax(-1)[:-1] for m in (base, student))
        for t, target in enumerate(sample.input_ids[1:]):
            octave = next(name for name, last in OCTAVES.items() if t <= last)
            kl = float((log_p[t].exp() * (log_p[t] - log_q[t])).sum())
            expected.setdefault(octave, []).append((kl, -float(log_q[t, target])))
    # A position is that in its own document, so packing changes none.
    for data, batch_size in ((samples(), 1), (samples(), 8), (list(pack(samples(), 16)), 8)):
        found = evaluate(student, tokenizer, data, batch_size=batch_size).positions
        # the last tokens of the longest sample alone are at 8 and beyond: one has no error
        assert list(found) == list(OCTAVES)[:-1]
        for name, figures in found.items():
            kl, nll = torch.tensor(expected[name]).mean(dim=0).tolist()
            assert figures.tokens == len(expected[name])
            assert figures.kl == pytest.approx(kl, rel=1e-4)  # as above
            assert math.log(figures.perplexity) == pytest.approx(nll, rel=1e-4)


def test_a_student_whose_adapters_do_nothing_is_the_floor_and_the_teacher_is_itself(
    load_model, tokenizer
) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    enlarge(model, b=0)
    found = evaluate(model, tokenizer, samples())
    assert found.student == found.floor != found.teacher
    teacher = found.teacher
    assert (teacher.perplexity_ratio, teacher.perplexity_ratio_se) == (1.0, 0.0)
    assert (teacher.kl, teacher.kl_se, teacher.top1, teacher.top1_se) == (0.0, 0.0, 1.0, 0.0)
    assert (teacher.acceptance, teacher.acceptance_se) == (1.0, 0.0)
    assert all(
        values["nmse_student"] == values["nmse_floor"] > 0 for values in found.layers.values()
    )


def test_a_student_with_the_attention_residual_starts_as_its_teacher(load_model, tokenizer) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="all", residual="keep"))
    found = evaluate(model, tokenizer, samples())
    # the same products in the same order, scaled by exactly 1
    assert found.student.kl == pytest.approx(0.0, abs=1e-9)
    assert found.student.top1 == 1.0
    assert all(values["nmse_student"] < 1e-12 for values in found.layers.values())


def test_the_layers_nmse_is_that_of_the_teachers_own_states(student, load_model, tokenizer) -> None:
    base = load_model()
    sums = {(i, kind): 0.0 for i in (1, 3) for kind in ("floor", "student")}
    for sample in samples():
        seen = states_of(base, sample)
        for i, kind in sums:
            layer, h, t = student.model.layers[i], seen[i, "h"], seen[i, "t"].double()
            with torch.no_grad(), adapter_mode(student, kind):
                o = student_output(layer, h, seen[i, "a"])[0].double()
            sums[i, kind] += float(((o - t).pow(2).sum(-1) / t.pow(2).sum(-1)).sum())
    layers = evaluate(student, tokenizer, samples()).layers
    assert layers.keys() == {1, 3}
    for (i, kind), total in sums.items():
        # fp32 against fp64 sums
        assert layers[i][f"nmse_{kind}"] == pytest.approx(total / sum(LENGTHS), rel=1e-5)


def test_the_errors_of_layers_are_taken_over_samples(student, tokenizer) -> None:
    alone = [evaluate(student, tokenizer, [sample]) for sample in samples()]
    counts = torch.tensor(LENGTHS, dtype=torch.float64)
    for index, values in evaluate(student, tokenizer, samples()).layers.items():
        for key in [name for name in values if not name.endswith("_se")]:
            means = torch.tensor([one.layers[index][key] for one in alone], dtype=torch.float64)
            expected = mean_and_error(means * counts, counts)
            # fp32, other padding
            assert (values[key], values[f"{key}_se"]) == pytest.approx(expected, rel=1e-4), key


def test_the_free_running_error_is_that_of_the_models_own_stream(
    student, load_model, tokenizer
) -> None:
    base = load_model()
    sums = {(i, mode): 0.0 for i in (1, 3) for mode in ("floor", "student")}
    for sample in samples():
        streams = {}
        for name, model, mode in (
            ("teacher", base, None),
            ("floor", student, "floor"),
            ("student", student, "student"),
        ):
            seen: dict[int, Tensor] = {}
            handles = [
                model.model.layers[i].register_forward_hook(
                    lambda _, __, out, i=i, seen=seen: seen.update({i: out[0].double()})
                )
                for i in (1, 3)
            ]
            with adapter_mode(model, mode) if mode else nullcontext():
                logits_of(model, sample)
            for handle in handles:
                handle.remove()
            streams[name] = seen
        for i, mode in sums:
            o, t = streams[mode][i], streams["teacher"][i]
            sums[i, mode] += float(((o - t).pow(2).sum(-1) / t.pow(2).sum(-1)).sum())
    found = evaluate(student, tokenizer, samples())
    for (i, mode), total in sums.items():
        values = found.layers[i]
        # fp32, in padded rows, against fp64 sums
        assert values[f"free_running_{mode}"] == pytest.approx(total / sum(LENGTHS), rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_student_is_reported_as_broken_and_nobody_else(
    load_model, tokenizer, value
) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    before = evaluate(model, tokenizer, samples())
    with torch.no_grad():
        model.model.layers[1].npt.A[0, 0] = value
    found = evaluate(model, tokenizer, samples())
    assert (found.teacher, found.floor) == (before.teacher, before.floor)
    assert all(
        math.isnan(figure) for key, figure in found.student.as_dict().items() if key != "tokens"
    )
    assert math.isnan(found.layers[1]["nmse_student"]) and math.isnan(
        found.layers[3]["free_running_student"]
    )
    # fed the teacher's states, it is whole
    assert found.layers[3]["nmse_student"] == before.layers[3]["nmse_student"]
    assert found.layers[1]["nmse_floor"] == before.layers[1]["nmse_floor"]
    with pytest.raises(NumericalError, match="not finite"):
        evaluate(model, tokenizer, samples(), divergence_prompts=2, max_new_tokens=4)


def test_a_base_in_sixteen_bits_is_measured_in_thirty_two(load_model, tokenizer) -> None:
    model = load_model(None, use_fp16=True)
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    found = evaluate(model, tokenizer, samples(), divergence_prompts=2, max_new_tokens=4)
    assert found.teacher.kl == 0.0 < found.student.kl < math.inf
    assert all(math.isfinite(value) for layer in found.layers.values() for value in layer.values())


def test_a_batch_takes_three_passes_of_the_model_and_of_its_head(student, tokenizer) -> None:
    passes = {"embedding": 0, "head": 0}
    handles = [
        module.register_forward_hook(lambda *_, name=name: passes.update({name: passes[name] + 1}))
        for name, module in (("embedding", student.model.embed_tokens), ("head", student.lm_head))
    ]
    evaluate(student, tokenizer, samples(), batch_size=3)
    for handle in handles:
        handle.remove()
    assert passes == {"embedding": 3 * 2, "head": 3 * 2}  # of two batches


def test_a_batchs_states_are_gone_when_the_next_one_begins(student, tokenizer, monkeypatch) -> None:
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    real = evaluate_module.final_states

    def counting(model: nn.Module, batch: Any) -> Tensor:
        alive.append(sum(state() is not None for state in held))
        states = real(model, batch)
        held.append(weakref.ref(states))
        return states

    monkeypatch.setattr(evaluate_module, "final_states", counting)
    evaluate(student, tokenizer, random_samples([9] * 6), batch_size=2)
    assert alive == [0, 1, 2] * 3


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_batch_size_does_not_change_the_figures(student, tokenizer, batch_size) -> None:
    # Not to the bit: rows are padded to other lengths, and attention then sums in another order.
    assert_same(
        evaluate(student, tokenizer, samples(), batch_size=batch_size),
        evaluate(student, tokenizer, samples()),
        rel=1e-5,
    )


def test_garbage_in_the_padding_embedding_does_not_reach_the_figures(load_model, tokenizer) -> None:
    model = load_model()
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    before = evaluate(model, tokenizer, samples())
    model.model.embed_tokens.weight.data[tokenizer.pad_token_id] = math.nan
    assert evaluate(model, tokenizer, samples()) == before


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_and_amount_of_padding_do_not_change_the_figures(
    student, tokenizer, side, monkeypatch
) -> None:
    before = evaluate(student, tokenizer, samples())
    monkeypatch.setattr(
        evaluate_module,
        "batches",
        lambda some, size: iter([collate(list(some), side=side, length=20)]),
    )
    # attention sums in another order
    assert_same(evaluate(student, tokenizer, samples()), before, rel=1e-5)


def test_records_and_the_samples_cut_from_them_give_the_same(student, tokenizer) -> None:
    records = [{"input_ids": list(s.input_ids)} for s in samples()]
    whole = evaluate(student, tokenizer, samples())
    for data in (records, iter(records), (s for s in samples())):
        assert evaluate(student, tokenizer, data) == whole
    config = DataConfig(text_column="body", max_length=6)
    texts = evaluate(student, tokenizer, [{"body": "abcdefgh"}], data_config=config)
    # <s> a-e | f-h </s>: the first token of each sample is predicted by nothing.
    assert texts.teacher.tokens == 5 + 3


@pytest.mark.parametrize("limit", [1, 3])
def test_max_samples_bounds_what_is_read(student, tokenizer, limit) -> None:
    found = evaluate(student, tokenizer, samples(), max_samples=limit)
    assert_same(found, evaluate(student, tokenizer, samples()[:limit]), rel=0)
    assert found.teacher.tokens == sum(LENGTHS[:limit]) - limit
    assert math.isnan(found.student.kl_se) == (limit == 1)


PROMPTS = [
    {"prompt": "abcd", "completion": "xyz"},
    {"prompt": "ab", "completion": "hijklm"},
    {"prompt": "", "completion": "w"},
]


def test_of_prompts_and_completions_only_the_completions_are_scored(
    student, load_model, tokenizer
) -> None:
    base = load_model()
    nll = kl = 0.0
    tokens = 0
    for r in PROMPTS:
        prompt = tokenizer(r["prompt"])["input_ids"]
        whole = Sample(
            "",
            (
                *prompt,
                *tokenizer(r["completion"], add_special_tokens=False)["input_ids"],
                tokenizer.eos_token_id,
            ),
        )
        log_p, log_q = (logits_of(model, whole).log_softmax(-1) for model in (base, student))
        for t in range(len(prompt), len(whole.input_ids)):
            nll -= float(log_q[t - 1, whole.input_ids[t]])
            kl += float((log_p[t - 1].exp() * (log_p[t - 1] - log_q[t - 1])).sum())
            tokens += 1
    found = evaluate(student, tokenizer, PROMPTS).student
    assert found.tokens == tokens == 4 + 7 + 2  # with the end token each
    # fp32 against fp64
    assert (found.perplexity, found.kl) == pytest.approx(
        (math.exp(nll / tokens), kl / tokens), rel=1e-4
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_rows_give_the_figures_of_their_documents(
    student, tokenizer, side, monkeypatch
) -> None:
    rows = pack(samples(), 16)
    assert len(rows) < len(samples())
    monkeypatch.setattr(
        evaluate_module, "batches", lambda some, size: iter([collate(list(some), side=side)])
    )
    packed, alone = (evaluate(student, tokenizer, data) for data in (rows, samples()))
    for one, other in (
        *((asdict(getattr(packed, m)), asdict(getattr(alone, m))) for m in ("floor", "student")),
        *((packed.layers[i], alone.layers[i]) for i in alone.layers),
    ):
        # attention sums in another order; errors are over rows
        means = [{k: v for k, v in each.items() if not k.endswith("_se")} for each in (one, other)]
        assert means[0] == pytest.approx(means[1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_modes_flags_weights_and_random_state_stay(student, tokenizer, training) -> None:
    student.train(training)
    student.model.layers[3].npt.mode = "floor"
    before = {key: value.clone() for key, value in student.state_dict().items()}
    random_state = torch.get_rng_state()
    try:
        evaluate(student, tokenizer, samples())
        assert {module.training for module in student.modules()} == {training}
        assert [layer.npt.mode for _, layer in npt_layers(student)] == ["student", "floor"]
        assert not [module for module in student.modules() if module._forward_hooks]
    finally:
        student.eval()
        student.model.layers[3].npt.mode = "student"
    assert all(torch.equal(value, before[key]) for key, value in student.state_dict().items())
    assert all(p.grad is None for p in student.parameters())
    assert [name for name, p in student.named_parameters() if p.requires_grad] == list(
        adapter_parameters(student)
    )
    assert torch.equal(torch.get_rng_state(), random_state)


def test_modes_and_flags_come_back_after_a_failure(student, tokenizer, monkeypatch) -> None:
    student.train()
    monkeypatch.setattr(layers_module, "nmse_per_token", lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            evaluate(student, tokenizer, samples())
        assert student.training
        assert {layer.npt.mode for _, layer in npt_layers(student)} == {"student"}
        assert not [module for module in student.modules() if module._forward_hooks]
    finally:
        student.eval()


@pytest.mark.parametrize(
    ("data", "error", "told"),
    [
        ([], DataError, "two tokens"),
        (iter([]), DataError, "two tokens"),
        ([{"text": ""}], DataError, "two tokens"),
        ([{"input_ids": [5]}], DataError, "two tokens"),
        ([Sample("a", (5, 6), (-100, -100))], DataError, "no token to predict in the evaluation"),
        ([Sample("there", (5, 999))], DataError, r"999.*sample there"),
    ],
)
def test_data_that_cannot_be_evaluated_on_are_refused(
    student, tokenizer, data, error, told
) -> None:
    with pytest.raises(error, match=told):
        evaluate(student, tokenizer, data)


def test_a_model_without_adapters_is_refused(load_model, tokenizer) -> None:
    with pytest.raises(ModelError, match=r"npt\.attach"):
        evaluate(load_model(), tokenizer, samples())


def test_after_puts_the_first_student_beside_the_last() -> None:
    def some(kl: float) -> Figures:
        return Figures(9, *(kl,) * 10)

    initial = Fidelity(
        some(0), some(3), some(2), None, {1: {"nmse_floor": 0.5, "nmse_student": 0.4}}
    )
    final = Fidelity(some(0), some(3), some(1), None, {1: {"nmse_floor": 0.5, "nmse_student": 0.1}})
    both = final.after(initial)
    assert both.initial is initial.student and both.student is final.student
    assert both.layers == {1: {"nmse_floor": 0.5, "nmse_student": 0.1, "nmse_initial": 0.4}}
    assert final.initial is None and initial.layers[1].keys() == {"nmse_floor", "nmse_student"}


def test_the_record_has_the_promised_keys_and_is_json(student, tokenizer) -> None:
    found: dict[str, Any] = json.loads(
        json.dumps(evaluate(student, tokenizer, samples()).as_dict(), allow_nan=False)
    )
    assert found.keys() == {"teacher", "floor", "student", "layers", "positions"}
    of_model = ("perplexity", "perplexity_ratio", "kl", "top1", "acceptance")
    of_layer = ("nmse_floor", "nmse_student", "free_running_floor", "free_running_student")
    for values, names, further in (
        (found["student"], of_model, {"tokens"}),
        (found["layers"]["1"], of_layer, set()),
    ):
        assert values.keys() == {f"{key}{tail}" for key in names for tail in ("", "_se")} | further
    assert found["layers"].keys() == {"1", "3"}


def test_the_record_reads_back_through_json(student, tokenizer) -> None:
    found = evaluate(student, tokenizer, samples(), divergence_prompts=2, max_new_tokens=4).after(
        evaluate(student, tokenizer, samples())
    )
    assert Fidelity.from_dict(json.loads(to_json(found.as_dict()))) == found
    assert found.initial is not None and found.divergence is not None


def test_the_change_pairs_the_samples_also_of_a_resumed_run(student, tokenizer) -> None:
    found = evaluate(student, tokenizer, samples())
    kept = {**found.as_dict(), "samples": found.samples}  # as a checkpoint keeps it
    initial = Fidelity.from_dict(json.loads(to_json(kept)))
    for judged_by in ("kl", "perplexity"):
        change = found.after(initial, judged_by).change
        assert change is not None and change.before_se > 0
        assert (change.figure, change.change, change.change_se) == (judged_by, 0, 0)
        unknown = found.after(Fidelity.from_dict(found.as_dict()), judged_by).change
        assert unknown is not None and unknown.change_se > change.before_se


def test_a_record_with_null_is_read_with_nan() -> None:
    some = Figures(9, *(0.5,) * 10).as_dict()
    models = dict.fromkeys(("teacher", "floor", "initial", "student"), some)
    layers = {"3": {"nmse_floor": 0.5, "nmse_student": None}}
    read = Fidelity.from_dict({**models, "layers": layers, "heldout": True})
    assert read.layers[3]["nmse_floor"] == 0.5 and math.isnan(read.layers[3]["nmse_student"])
    assert (read.divergence, read.positions, read.attribution) == (None, {}, {})
    again = read.after(read)
    assert again.layers[3].keys() == {"nmse_floor", "nmse_student", "nmse_initial"}
