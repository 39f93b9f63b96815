"""Disagreements of student and teacher as training data.

The teacher continues each prompt greedily. A prompt at which the student would have written another
token becomes a record, with the teacher's continuation as the completion. The record holds the
tokens with the texts, because text does not always encode back to its tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, attached_config, evaluating
from npt.adapters.files.adapter_files import adapter_hash
from npt.adapters.fit import check_length
from npt.base.identity import BaseIdentity, base_identity
from npt.config import DataConfig
from npt.data.batch import IGNORE_INDEX, Sample
from npt.data.chat import date_of, fix_date, has_template
from npt.data.continuation import continuation_text
from npt.data.source import Record
from npt.errors import ConfigError, DataError
from npt.evaluation.greedy import Comparison, compare_prompts, continue_greedily, end_ids
from npt.evaluation.metrics import COLUMNS
from npt.runs.signals import StopOnSignal
from npt.tools.collect.journal import Journal, read_journal
from npt.tools.collect.prompts import read_prompts

NUM_PROMPTS = 256
MAX_NEW_TOKENS = 64

_DATE = "the chat template's date"

_KL, _TOP1, _ACCEPTANCE = (COLUMNS.index(name) for name in ("kl", "top1", "acceptance"))


@dataclass(frozen=True)
class Progress:
    """Prompts that are done, those at which the student differs, and sums over the teacher's
    tokens.

    Attributes:
        prompts_sha256: of the prompts' tokens, to notice other data.
    """

    prompts: int = 0
    disagreements: int = 0
    tokens: int = 0
    agreed_sum: float = 0.0
    kl_sum: float = 0.0
    acceptance_sum: float = 0.0
    prompts_sha256: str = hashlib.sha256().hexdigest()


@dataclass(frozen=True)
class CollectResult:
    """A collection.

    Attributes:
        resumed: prompts that an earlier call had done.
        signal: the one that ended this call early.
    """

    output: Path
    progress: Progress
    resumed: int
    signal: int | None = None

    @property
    def exit_status(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON; means are per token of the teacher's continuations."""
        p, tokens = self.progress, max(1, self.progress.tokens)
        return {
            "output": str(self.output),
            "prompts": p.prompts,
            "disagreements": p.disagreements,
            "tokens": p.tokens,
            "top1": p.agreed_sum / tokens,
            "kl": p.kl_sum / tokens,
            "acceptance": p.acceptance_sum / tokens,
            "resumed": self.resumed,
            "signal": self.signal,
        }


def collect(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Iterable[Record],
    output: str | Path,
    *,
    data_config: DataConfig | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    num_prompts: int | None = NUM_PROMPTS,
    batch_size: int = 8,
    seed: int = 0,
    base: BaseIdentity | None = None,
    report: Callable[[Progress], None] = lambda _: None,
) -> CollectResult:
    """Write the prompts at which the student differs from its teacher to `output`, a .jsonl file.

    Called again with the same settings it resumes after the last finished batch; the file is then
    the one that an uninterrupted call writes, byte for byte at the same batch size.

    Args:
        data: records with prompts or texts, see `read_prompts`.
        output: written at the end from `<output>.journal`.
        data_config: columns and `max_length`, which prompt and completion together stay within.
        num_prompts: how many in all, earlier calls included; None for all.
        base: `npt.base_identity(model)`, if known already.
        report: told after every batch.

    Raises:
        ConfigError: settings that cannot work, or an output of other settings or data.
        DataError: no prompts.
        NumericalError: logits that are not finite.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    config = data_config if data_config is not None else DataConfig()
    check_length(config.max_length, model.config)
    length = prompt_length(config, max_new_tokens)
    # the file promises the same bytes
    base_hash = (base if base is not None else base_identity(model)).strict
    settings = {
        "base": base_hash,
        "adapter": adapter_hash(model),
        "--max_new_tokens": max_new_tokens,
        "--max_length": config.max_length,
        "--text_column": config.text_column,
        "--prompt_column": config.prompt_column,
        "--seed": seed,
    }
    if has_template(tokenizer):
        begun = read_journal(Path(output))[0].get(_DATE)
        if begun is not None:
            fix_date(tokenizer, begun)
        settings[_DATE] = date_of(tokenizer)
    origin = {"base_hash": base_hash, "adapter_hash": settings["adapter"]}
    prompts = read_prompts(data, tokenizer, config, length=length, seed=seed)
    first = next(prompts, None)  # before there is a file
    if first is None:
        raise DataError(
            "no prompt of two tokens or more came out of the data; check --dataset_name and its"
            " columns"
        )
    prompts = itertools.chain([first], prompts)
    ends, digest = end_ids(model, tokenizer), hashlib.sha256()
    with evaluating(model), Journal(output, settings) as journal, StopOnSignal() as stop:
        done = Progress(**journal.progress)
        resumed = done.prompts
        for prompt in itertools.islice(prompts, resumed):
            digest.update(_bytes(prompt))
        if digest.hexdigest() != done.prompts_sha256:
            raise ConfigError(
                f"--output {journal.output} was begun on other data: its first {resumed} prompts"
                " are not those of this call; choose another file, or the data of before"
            )
        while stop.number is None and (num_prompts is None or done.prompts < num_prompts):
            left = batch_size if num_prompts is None else num_prompts - done.prompts
            batch = list(itertools.islice(prompts, min(batch_size, left)))
            if not batch:
                break
            compared = compare_prompts(model, batch, max_new_tokens, ends)
            differing = [c for c in compared if c.position is not None]
            records = _records(model, tokenizer, differing, max_new_tokens, ends)
            for prompt in batch:
                digest.update(_bytes(prompt))
            sums = torch.stack([c.figures.sum(dim=0) for c in compared]).sum(dim=0)
            done = Progress(
                prompts=done.prompts + len(compared),
                disagreements=done.disagreements + len(differing),
                tokens=done.tokens + sum(len(c.completion) for c in compared),
                agreed_sum=done.agreed_sum + float(sums[_TOP1]),
                kl_sum=done.kl_sum + float(sums[_KL]),
                acceptance_sum=done.acceptance_sum + float(sums[_ACCEPTANCE]),
                prompts_sha256=digest.hexdigest(),
            )
            journal.commit([record | origin for record in records], asdict(done))
            report(done)
    return CollectResult(journal.output, done, resumed, stop.number)


def prompt_length(config: DataConfig, max_new_tokens: int) -> int:
    """Return the most tokens of a prompt that is one sample of `max_length` with its completion;
    raise ConfigError if there is no room for a prompt.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"--max_new_tokens is {max_new_tokens}; it must be at least 1")
    length = config.max_length - max_new_tokens
    if length < 2:
        raise ConfigError(
            f"--max_new_tokens is {max_new_tokens} of --max_length {config.max_length}, which"
            " leaves no room for a prompt of two tokens; lower one or raise the other"
        )
    return length


def _records(
    model: PreTrainedModel,
    tokenizer: Any,
    differing: Sequence[Comparison],
    max_new_tokens: int,
    ends: frozenset[int],
) -> list[dict[str, Any]]:
    """Return the records of prompts at which the student differs, with its own continuation."""
    starts = [c.student_start for c in differing]
    limits = [0 if start[-1] in ends else max_new_tokens - len(start) for start in starts]
    begun = [(*c.prompt.input_ids, *start) for c, start in zip(differing, starts, strict=True)]
    with adapter_mode(model, "student"):
        rests = continue_greedily(model, begun, limits, ends, [c.prompt.id for c in differing])

    records = []
    for c, start, rest in zip(differing, starts, rests, strict=True):
        assert c.position is not None
        prompt, at = c.prompt.input_ids, c.figures[c.position]
        records.append(
            {
                "id": c.prompt.id,
                "prompt": tokenizer.decode(list(prompt), skip_special_tokens=True),
                "completion": continuation_text(tokenizer, prompt, c.completion),
                "student": continuation_text(tokenizer, prompt, (*start, *rest)),
                "position": c.position,
                "teacher_token": c.completion[c.position],
                "student_token": c.student_token,
                "kl": float(c.figures[:, _KL].mean()),
                "kl_at": float(at[_KL]),
                "acceptance": float(c.figures[:, _ACCEPTANCE].mean()),
                "acceptance_at": float(at[_ACCEPTANCE]),
                "tokens": len(c.completion),
                "input_ids": [*prompt, *c.completion],
                "labels": [*[IGNORE_INDEX] * len(prompt), *c.completion],
            }
        )
    return records


def _bytes(prompt: Sample) -> bytes:
    return array("q", (len(prompt.input_ids), *prompt.input_ids)).tobytes()
