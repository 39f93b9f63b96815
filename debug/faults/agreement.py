"""Checks that two ways to compute agree: attention, windows, tokens, calls of whole layers.

Nothing may be refused, and nothing may differ.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import MistralConfig, PreTrainedModel, PreTrainedTokenizerFast

from faults.bench import Setting, Student, embedded
from faults.verdict import Verdict, verdict_of
from npt.adapters.converted import adapter_mode, adapters_disabled, decoder_layers
from npt.adapters.layer import NPTLayer
from npt.adapters.stream import open_stream
from npt.batch import Batch
from npt.config import STRATEGIES, DataConfig, TrainConfig
from npt.data.samples import cut
from npt.distill.hidden_losses import HIDDEN_LOSSES
from npt.distill.strategies import drive
from npt.evaluation.greedy import continue_greedily
from random_base import random_base


def other_attention(setting: Setting) -> Verdict:
    """Check a second model as the teacher, with another attention and so another kind of mask."""
    teacher = copy.deepcopy(embedded(setting.base_layers))
    batch = setting.batch((0, 0))
    complaints = []
    for strategy in STRATEGIES:
        student = Student(replace(setting, strategy=strategy))
        losses = {}
        for attention in ("sdpa", "eager"):
            teacher.set_attn_implementation(attention)
            losses[attention] = float(drive(student.model, batch, student.config, teacher).loss)
        # sums have another order, and the difference of states loses digits
        if not abs(losses["eager"] / losses["sdpa"] - 1) < 1e-3:
            complaints.append(
                f"{strategy}: loss {losses['eager']:.6g} from an eager teacher,"
                f" {losses['sdpa']:.6g} from SDPA"
            )
    return verdict_of("unharmed", complaints)


def as_called(setting: Setting) -> Verdict:
    """Compare a strategy with calls of whole decoder layers and automatic differentiation."""
    student, batch = Student(setting), setting.batch((0, 0))
    with torch.no_grad():
        for seed, parameter in enumerate(student.parameters.values()):
            parameter.copy_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            )
    config = replace(student.config, logit_kl_weight=0.0)
    loss = float(drive(student.model, batch, config).loss)
    gradients = {name: p.grad for name, p in student.parameters.items()}
    expected = by_calls(student.model, batch, config)
    called = float(expected.detach())
    complaints = []
    if not abs(loss / called - 1) < 1e-4:  # fp32 sums in another order
        complaints.append(f"loss {loss:.6g}, but {called:.6g} from calls")
    wanted = torch.autograd.grad(expected, list(student.parameters.values()))
    for name, gradient in zip(student.parameters, wanted, strict=True):
        ours = gradients[name]
        if ours is None or not float((ours - gradient).norm()) <= 1e-3 * float(gradient.norm()):
            complaints.append(f"gradient of {name} differs")
            break
    return verdict_of("unharmed", complaints)


def by_calls(model: PreTrainedModel, batch: Batch, config: TrainConfig) -> Tensor:
    """Return a strategy's loss on hidden states, a scalar with its graph, computed from calls of
    whole decoder layers.
    """
    stream = open_stream(model, batch)
    taught = hidden = stream.hidden
    losses = []
    for layer in decoder_layers(model):
        context = stream.context_of(layer)
        with torch.no_grad(), adapters_disabled(model):
            after = stream.clean(layer(taught, **context))
        with adapter_mode(model, "student"):
            out = stream.clean(layer(hidden, **context))
        if isinstance(layer, NPTLayer):
            rows = [stream.rows(states) for states in (out, after, taught)]
            losses.append(HIDDEN_LOSSES[config.loss](*rows).sum())
        taught = after
        hidden = {"local": after, "propagated": out.detach(), "end_to_end": out}[config.strategy]
    return torch.stack(losses).sum() / len(losses)


def unequal_prompts(setting: Setting) -> Verdict:
    """Check prompts of unequal length in one batch, with a sliding window of four tokens."""
    size = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(**size, **heads, sliding_window=4)
    model = random_base(config, quantization=None, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)  # so that attention decides the next token
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (2, 9, 5)]
    names = [f"prompt {row}" for row in range(3)]
    together = continue_greedily(model, prompts, [8] * 3, (), names)
    complaints = []
    for name, prompt, found in zip(names, prompts, together, strict=True):
        (alone,) = continue_greedily(model, [prompt], [8], (), [name])
        if found != alone:
            complaints.append(f"{name} continues with {found} in a batch and with {alone} alone")
    return verdict_of("unharmed", complaints)


def space_in_front(setting: Setting) -> Verdict:
    """Check a tokenizer that begins every text with a space."""
    tokenizer = _metaspace()
    complaints = []
    for prompt, completion in (("the:", "answer"), ("the", " answer"), ("the: ", "answer")):
        (sample,) = cut(
            [{"prompt": prompt, "completion": completion}], tokenizer, DataConfig(max_length=32)
        )
        targets = [label for label in sample.labels or () if label != -100]
        text = tokenizer.decode([*sample.input_ids])
        if text != prompt + completion or sample.input_ids[-len(targets) :] != tuple(targets):
            complaints.append(f"{prompt!r} and {completion!r} became {text!r}")
    return verdict_of("unharmed", complaints)


def _metaspace() -> Any:
    pieces = {"<unk>": 0.0, "▁": -3.0, "▁the": -1.0, "▁answer": -1.0, "answer": -2.0, ":": -2.0}
    letters = [(c, -9.0) for c in "theanswr"]
    backend = Tokenizer(models.Unigram([*pieces.items(), *letters], unk_id=0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
