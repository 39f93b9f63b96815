"""Checks of what becomes of data: masks, padding, prompts, truncation, mixing, failures."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from faults.transient_faults import padding_spoilt
from fixes.check import (
    ROUNDING,
    Subject,
    Wrong,
    device_of,
    ensure,
    gradients_of,
    padded_batch,
    proves,
    samples_of,
    student_of,
)
from npt.adapters.stream import open_stream
from npt.batch import IGNORE_INDEX, batch_from_tensors, collate
from npt.config import DataConfig
from npt.data.encoding import Encoder
from npt.data.samples import Loader, Samples, cut
from npt.data.source import open_source
from npt.tools.collect.collect import collect
from npt.tracer.mask_check import mask_fault

SIDES = ("left", "right")


@proves("every valid query has a key, and none of them is padding")
def keyed(subject: Subject) -> str:
    seen = 0
    for side in SIDES:
        batch = padded_batch(subject, side).to(device_of(subject))
        mask = open_stream(subject.model, batch).masks[0]
        if mask is None:
            raise Wrong(f"there is no mask for padding on the {side}")
        if mask.ndim != 4:
            raise Wrong(f"cannot be checked: the mask has the shape {list(mask.shape)}")
        fault = mask_fault(mask, batch.attention_mask)
        if fault is not None:
            raise Wrong(f"padding on the {side}: {fault}")
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        valid = batch.attention_mask.bool()
        leaks = allowed & valid[:, None, :, None] & ~valid[:, None, None, :]
        if bool(leaks.any()):
            raise Wrong(f"padding on the {side}: {int(leaks.sum())} valid queries see padding")
        seen += batch.tokens
    return f"{seen} valid queries, padding on the left and on the right"


@proves("padded queries are zeroed: NaN there reaches no loss and no gradient")
def padding_zeroed(subject: Subject) -> str:
    student = student_of(subject)
    first = f"model.layers.{student.model.config.num_hidden_layers // 2}.self_attn.o_proj"
    for side in SIDES:
        batch = padded_batch(subject, side)
        sums, gradients = gradients_of(student, batch)
        with padding_spoilt(first, math.nan)(student, batch.to(device_of(subject))):
            spoilt, others = gradients_of(student, batch)
        changed = [name for name, one in gradients.items() if not torch.equal(one, others[name])]
        if not torch.equal(sums.loss, spoilt.loss) or changed:
            raise Wrong(
                f"padding on the {side}: the loss went from {float(sums.loss):g} to"
                f" {float(spoilt.loss):g}, {len(changed)} gradients changed"
            )
    return f"loss and {len(gradients)} gradients bit-equal with NaN in all padded rows"


@proves("the attention mask reaches the loss: padding is never counted")
def padding_uncounted(subject: Subject) -> str:
    student, samples = student_of(subject), samples_of(subject)
    tokens = sum(len(sample.input_ids) for sample in samples)
    alone = sum(float(gradients_of(student, collate([sample]))[0].loss) for sample in samples)
    said = [f"{alone / tokens:.6g} one by one"]
    for length in (16, 40):
        sums, _ = gradients_of(student, collate(samples, length=length))
        mean = float(sums.loss) / sums.tokens
        said.append(f"{mean:.6g} padded to {length}")
        close = abs(mean / (alone / tokens) - 1) < ROUNDING
        ensure(close and sums.tokens == tokens, f"{', '.join(said)}; {sums.tokens} of {tokens}")
    return f"loss per token {', '.join(said)}; {tokens} of {tokens} tokens counted"


@proves("prompts are masked: only completions are targets")
def prompts_masked(subject: Subject) -> str:
    record = {"prompt": "The quick brown fox jumps over", "completion": " the lazy dog."}
    (sample,) = Encoder(subject.tokenizer, DataConfig(max_length=64)).samples(0, record)
    targets = [label for label in sample.labels or () if label != IGNORE_INDEX]
    words = subject.tokenizer.decode(targets, skip_special_tokens=True)
    scored = collate([sample]).scored
    return ensure(
        words.strip() == record["completion"].strip() and scored == len(targets),
        f"{scored} of {len(sample.input_ids)} tokens are targets: {words!r}",
    )


@proves("truncation keeps the targets")
def targets_kept(subject: Subject) -> str:
    record = {"prompt": "word " * 400, "completion": " and so it ends here."}
    samples = []
    for length in (32, 4096):
        encoder = Encoder(subject.tokenizer, DataConfig(max_length=length))
        samples += encoder.samples(0, record)
    counts = []
    for sample in samples:
        counts.append(sum(label != IGNORE_INDEX for label in sample.labels or ()))
    short, long = samples
    return ensure(
        counts[0] == counts[1] > 0 and len(short.input_ids) <= 32,
        f"{counts[0]} of {counts[1]} targets left when {len(long.input_ids)} tokens become"
        f" {len(short.input_ids)}",
    )


@proves("a batch without a target or a valid token divides by nothing")
def all_masked(subject: Subject) -> str:
    logits_only = {
        "strategy": "end_to_end",
        "hidden_weight": 0.0,
        "logit_kl_weight": 1.0,
        "logit_loss": "cross_entropy",
    }
    student, batch = student_of(subject, training=logits_only), padded_batch(subject)
    masked = replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX))
    sums, gradients = gradients_of(student, masked)
    finite = all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    ensure(float(sums.loss) == 0 and finite, f"loss {float(sums.loss)} without a target")
    student = student_of(subject, windows=1, size=1)
    empty = batch_from_tensors(batch.input_ids, torch.zeros_like(batch.input_ids))
    student.micro_batch(empty)
    student.results += student.guard.step()
    outcome = student.outcome()
    kinds = [refusal.kind for _, refusal in outcome.refusals]
    return ensure(
        kinds == ["data"] and outcome.steps == 0,
        f"loss 0 without a target; without a valid token refused as {', '.join(kinds)}",
    )


@proves("replayed samples are mixed in at their share")
def replayed(subject: Subject) -> str:
    share = 0.25
    each: list[Any] = []
    for name in ("new", "old"):
        records = [{"id": f"{name}{i}", "input_ids": [3, 4, 5, 6]} for i in range(900)]
        each.append(
            Samples(records, subject.tokenizer, DataConfig(), seed=len(each), hold_out=False)
        )
    loader = Loader(each[0], 4, replay=each[1], share=share)
    names = [name for batch, _ in loader.batches() for name in batch.sample_ids]
    old = sum(name.startswith("old") for name in names)
    found, spread = old / len(names), math.sqrt(share * (1 - share) / len(names))
    return ensure(
        abs(found - share) < 5 * spread and len(names) - old == 900,
        f"{old} of {len(names)} samples, {found:.1%} for {share:.0%}; all 900 new ones were seen",
    )


@proves("training on collected failures sees the teacher's tokens only")
def failures_trained(subject: Subject) -> str:
    student, data = student_of(subject, windows=1, size=1), DataConfig(max_length=32)
    prompts = [{"prompt": text} for text in ("import os", "def area(", "The answer is")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failures.jsonl"
        result = collect(
            subject.model, subject.tokenizer, prompts, path, data_config=data, max_new_tokens=6
        )
        if not result.disagreements:
            raise Wrong(f"cannot be checked: the student agrees in all {result.prompts} prompts")
        records = list(open_source(replace(data, dataset_name=str(path))))
    samples = list(cut(records, subject.tokenizer, data))
    targets = 0
    for record, sample in zip(records, samples, strict=True):
        labels = [label for label in sample.labels or () if label != IGNORE_INDEX]
        if labels != list(sample.input_ids)[-record["tokens"] :]:
            raise Wrong(f"the targets of {sample.id} are not the {record['tokens']} collected")
        targets += len(labels)
    student.micro_batch(collate(samples))
    student.results += student.guard.step()
    return ensure(
        student.outcome().steps == 1,
        f"{len(samples)} of {result.prompts} prompts collected, {targets} targets, 1 step",
    )
