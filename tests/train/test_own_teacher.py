"""A teacher of its own computes what it computes by itself, in whatever its configuration and not
the student's says of attention.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCAB, WINDOW, save_base
from students import moved
from torch import Tensor

import npt
from npt.adapters.converted import decoder_layers, npt_layers
from npt.adapters.stream import model_inputs
from npt.base.attention import SDPA
from npt.batch import Batch, Sample, batch_from_tensors, collate
from npt.config import TrainConfig
from npt.data.packing import pack
from npt.distill.strategies import STRATEGIES, drive

Change = Callable[[Any], None]


def rows(lengths: tuple[int, ...], side: str) -> Batch:
    width = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), width), generator=torch.Generator().manual_seed(3))
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    mask = mask.flip(1) if side == "left" else mask
    return batch_from_tensors(torch.where(mask.bool(), ids, 2), mask)


def packed_rows() -> Batch:
    lengths = (9, 6, 7, 2, 3)
    ids = [
        torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in lengths
    ]
    return collate(pack([Sample(str(i), tuple(row)) for i, row in enumerate(ids)], 16), 2)


BATCHES = {
    "full": rows((9, 9), "right"),
    "right": rows((9, 5), "right"),
    "left": rows((5, 9), "left"),
    "packed": packed_rows(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = save_base(family, tmp_path_factory.mktemp("base"))
        return made[family]

    return of


@pytest.fixture(scope="module")
def pair(folder: Callable[[str], Path]) -> Callable[[str, str, Change], tuple[Any, Any]]:
    """`made_pair`, made once of each kind: what is computed with it changes nothing but
    gradients.
    """
    made: dict[tuple[str, str, Change], tuple[Any, Any]] = {}

    def of(family: str, attention: str, change: Change) -> tuple[Any, Any]:
        key = (family, attention, change)
        if key not in made:
            made[key] = made_pair(folder(family), attention, change)
        return made[key]

    return of


def made_pair(folder: Path, attention: str, change: Change) -> tuple[Any, Any]:
    """A 4-bit student that is away from its start, and an unquantised teacher, both changed after
    they were loaded.
    """
    model, _ = npt.load_base(str(folder), quantization="nf4", device="cpu")
    model.set_attn_implementation(attention)
    npt.attach(model, npt.NPTConfig(layers="1,3", rank=4, residual="keep"))
    moved(model, 0.2)
    teacher = npt.load_teacher(str(folder), "fp32", device="cpu")
    change(teacher)
    return model, teacher


def attention(name: str) -> Change:
    return lambda model: model.set_attn_implementation(name)


def window(model: Any) -> None:
    model.config.sliding_window = WINDOW + 2


def no_window(model: Any) -> None:
    model.config.sliding_window = None


def all_full(model: Any) -> None:
    model.config.layer_types = ["full_attention"] * 4


def rope(model: Any) -> None:
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 50.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)


@torch.no_grad()
def walk(model: Any, batch: Batch) -> tuple[list[tuple[Tensor, dict[str, Any], Tensor]], Tensor]:
    """(h, context, output) of every layer in the model's own forward, and its logits."""
    seen: list[tuple[Tensor, dict[str, Any], Tensor]] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, args, kwargs, output: seen.append((args[0], kwargs, output)), with_kwargs=True
        )
        for layer in decoder_layers(model)
    ]
    logits = model(**model_inputs(model, batch), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return seen, logits


def valid(states: Tensor, batch: Batch) -> Tensor:
    return states.flatten(0, 1)[batch.valid_index].double()


def assert_taught(model: Any, teacher: Any, batch: Batch, strategy: str) -> None:
    """The layers' NMSE, and the loss on the logits, are those of the two models' own forwards."""
    kl = 0.7 if strategy == "end_to_end" else 0.0
    sums = drive(model, batch, TrainConfig(strategy=strategy, logit_kl_weight=kl), teacher)
    taught, teacher_logits = walk(teacher, batch)
    learnt, student_logits = walk(model, batch)
    expected = []
    for index, layer in npt_layers(model):
        with torch.no_grad():
            fed = taught if strategy == "local" else learnt
            output = layer(fed[index][0].to(learnt[index][0].dtype), **learnt[index][1])
        target = valid(taught[index][2], batch)
        error = (valid(output, batch) - target).square().sum(-1)
        expected.append(float((error / target.square().sum(-1)).sum()))
    assert min(expected) > 1e-4  # a comparison of two zeros would show nothing
    # fp32 states, whose differences lose digits, in another order of summation; a student in fp16
    # rounds at 2^-11 throughout
    assert sums.layer_nmse.tolist() == pytest.approx(
        expected, rel=1e-3 if model.dtype != torch.float16 else 1e-2
    )
    if kl:
        log_p, log_q = (
            torch.log_softmax(logits.flatten(0, 1)[batch.scored_index].double(), dim=-1)
            for logits in (teacher_logits, student_logits)
        )
        assert float(sums.logit) == pytest.approx(
            float((log_p.exp() * (log_p - log_q)).sum()), rel=1e-3
        )


OTHERS: dict[str, tuple[str, str, Callable[[Any], None]]] = {
    "eager teacher": ("llama", SDPA, attention("eager")),
    "eager student": ("llama", "eager", attention("sdpa")),
    "another rope": ("llama", SDPA, rope),
    "windows, eager teacher": ("mistral, window", SDPA, attention("eager")),
    "another window": ("mistral, window", "eager", window),
    "no window": ("mistral, window", SDPA, no_window),
    "qwen3, eager student": ("qwen3, window", "eager", attention(SDPA)),
    "other layer types": ("qwen3, window", SDPA, all_full),
}


@pytest.mark.parametrize(  # every teacher with half the kinds of rows, the strategies in turns
    ("other", "rows", "strategy"),
    [
        (other, rows, sorted(STRATEGIES)[(i + j) % 3])
        for i, other in enumerate(OTHERS)
        for j, rows in enumerate(BATCHES)
        if (i + j) % 2
    ],
)
def test_a_teacher_with_other_attention_teaches_its_own_outputs(
    pair, other, rows, strategy
) -> None:
    model, teacher = pair(*OTHERS[other])
    assert_taught(model, teacher, BATCHES[rows], strategy)


@pytest.mark.parametrize(
    ("strategy", "attn"), [("local", "sdpa"), ("propagated", "eager"), ("end_to_end", "sdpa")]
)
def test_a_student_in_fp16_learns_from_a_teacher_in_fp32(folder, strategy, attn) -> None:
    model, _ = npt.load_base(
        str(folder("llama")), use_fp16=True, device="cpu", attn_implementation=attn
    )
    # which adds nothing yet to the error of leaving attention out
    npt.attach(model, npt.NPTConfig(layers="1,3", rank=4))
    teacher = npt.load_teacher(str(folder("llama")), "fp32", device="cpu")
    assert_taught(model, teacher, BATCHES["left"], strategy)
