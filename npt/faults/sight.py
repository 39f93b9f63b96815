"""Cases of what is seen and by whom: attention, windows and the tokens of a text, where nothing is refused and nothing must differ."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MistralConfig, PreTrainedTokenizerFast

from npt.config import STRATEGIES, DataConfig
from npt.data.samples import cut
from npt.distill.strategies import drive
from npt.faults.bench import SMALL, Setting, Student, embedded
from npt.faults.patterns import Case
from npt.faults.verdict import Verdict, verdict_of
from npt.generation.greedy import continue_greedily
from npt.quant.random_base import random_base

_WINDOW = 4


def other_attention(late: bool) -> Verdict:
    """A second model as the teacher, whose masks are another kind of tensor than the student's."""
    teacher, batch = copy.deepcopy(embedded()), SMALL.batch((0, 0))
    complaints = []
    for strategy in STRATEGIES:
        student = Student(Setting(strategy=strategy))
        found = {}
        for attention in ("sdpa", "eager"):
            teacher.set_attn_implementation(attention)
            found[attention] = float(drive(student.model, batch, student.config, teacher).loss)
        if not abs(found["eager"] / found["sdpa"] - 1) < 1e-3:  # another order of summation, in states whose difference loses digits
            complaints.append(f"{strategy}: a loss of {found['eager']:.6g} from an eager teacher, {found['sdpa']:.6g} under SDPA")
    return verdict_of("unharmed", complaints)


def unequal_prompts(late: bool) -> Verdict:
    """Prompts of unequal length in one batch, of a model that looks back on four tokens."""
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = random_base(MistralConfig(**size, num_key_value_heads=2, sliding_window=_WINDOW), quantization=None, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)  # so that attention decides which token is next
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in (2, 9, 5)]
    names = [f"prompt {row}" for row in range(3)]
    together = continue_greedily(model, prompts, [8] * 3, (), names)
    alone = [continue_greedily(model, [prompt], [8], (), [name])[0] for prompt, name in zip(prompts, names, strict=True)]
    return verdict_of(
        "unharmed", [f"{n} goes on with {a}, alone with {b}" for n, a, b in zip(names, together, alone, strict=True) if a != b]
    )


def space_in_front(late: bool) -> Verdict:
    """A tokenizer that begins every text with a space of its own."""
    tokenizer = _metaspace()
    complaints = []
    for prompt, completion in (("the:", "answer"), ("the", " answer"), ("the: ", "answer")):
        (sample,) = cut([{"prompt": prompt, "completion": completion}], tokenizer, DataConfig(max_length=32))
        targets = [label for label in sample.labels or () if label != -100]
        text = tokenizer.decode([*sample.input_ids])
        if text != prompt + completion or sample.input_ids[-len(targets) :] != tuple(targets):
            complaints.append(f"{prompt!r} and {completion!r} became {text!r}")
    return verdict_of("unharmed", complaints)


def _metaspace() -> Any:
    pieces = [
        ("<unk>", 0.0),
        ("▁", -3.0),
        ("▁the", -1.0),
        ("▁answer", -1.0),
        ("answer", -2.0),
        (":", -2.0),
        *((c, -9.0) for c in "theanswr"),
    ]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def sight_cases() -> list[Case]:
    once, truth = (False,), "no difference"
    return [
        Case("sight-attention", "a teacher of its own in eager attention, the student under SDPA", truth, other_attention, once),
        Case("sight-window", "prompts of unequal length under a sliding window", truth, unequal_prompts, once),
        Case("sight-space", "a tokenizer that begins every text with a space", truth, space_in_front, once),
    ]
