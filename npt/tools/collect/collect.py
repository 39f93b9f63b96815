"""Collect prompts on which student and teacher disagree, as training data.

The teacher continues each prompt greedily. If the student would have written a different token, the
prompt becomes a record with the teacher's continuation as its completion, and the student's own
beside it. A record holds tokens as well as texts, because a text does not always encode back to the
same tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, attached_config, evaluating
from npt.adapters.files.adapter_files import adapter_hash
from npt.adapters.fit import check_length
from npt.base.identity import BaseIdentity, base_identity
from npt.batch import IGNORE_INDEX, Sample
from npt.config import DataConfig
from npt.data.chat import date_of, fix_date, has_template
from npt.data.continuation import continuation_text
from npt.data.source import Record
from npt.errors import ConfigError, DataError
from npt.evaluation.greedy import Comparison, compare_prompts, continue_greedily, end_ids
from npt.evaluation.metrics import COLUMNS
from npt.runs.signals import StopOnSignal
from npt.tools.collect.output import Compared, Output, check_output, read_progress
from npt.tools.collect.prompts import read_prompts

_DATE = "the chat template's date"

_KL = COLUMNS.index("kl")
_TOP1 = COLUMNS.index("top1")
_ACCEPTANCE = COLUMNS.index("acceptance")


@dataclass(frozen=True)
class CollectResult:
    """The outcome of a collection.

    Attributes:
        resumed: number of prompts that earlier calls had compared.
        top1: share of the teacher's tokens on which both agree.
        kl: mean KL(teacher, student) over these tokens, nats.
        acceptance: mean speculative acceptance over these tokens.
        signal: number of the signal that ended the collection early, if any.
    """

    output: Path
    prompts: int
    disagreements: int
    tokens: int
    resumed: int
    top1: float
    kl: float
    acceptance: float
    signal: int | None

    @property
    def exit_status(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "output": str(self.output)}


def collect(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Iterable[Record],
    output: str | Path,
    *,
    data_config: DataConfig | None = None,
    max_new_tokens: int = 64,
    num_prompts: int | None = 256,
    batch_size: int = 8,
    seed: int = 0,
    base: BaseIdentity | None = None,
    report: Callable[[int], None] = lambda _: None,
) -> CollectResult:
    """Write the prompts on which student and teacher differ to `output`, a .jsonl file, batch by
    batch. After an interruption the same call goes on, and at the same batch size the file gets the
    same bytes as without one.

    Args:
        data: records with prompts or texts, see `read_prompts`.
        output: a file that does not exist yet, is empty, or is that of an interrupted call.
        data_config: columns, and the `max_length` of prompt and completion together.
        max_new_tokens: length limit of a continuation.
        num_prompts: compare at most this many; None for all.
        base: `npt.base_identity(model)`, if you have it.
        report: called after every batch with the number of prompts compared.

    Raises:
        ConfigError: the settings do not work together, the output is another one's, or the disk is
            full.
        DataError: the data give no prompt.
        NumericalError: logits are not finite.
        ModelError: no adapters are attached.
    """
    # refuse what can be refused before the base is read for its hash
    attached_config(model)
    config = data_config or DataConfig()
    output = Path(output)
    check_output(output)
    if config.context_column is not None:
        raise ConfigError(
            f"--context_column {config.context_column} has no effect on prompts, which teacher and"
            " student read alike: choose other data with --dataset_name, or pass --prompt"
        )
    check_length(config.max_length, model.config)
    length = config.max_length - max_new_tokens  # of a prompt, within one sample
    if max_new_tokens < 1 or length < 2:
        raise ConfigError(
            f"--max_new_tokens {max_new_tokens} must be at least 1 and leave room in --max_length"
            f" {config.max_length} for a prompt of two tokens"
        )
    base = base or base_identity(model)
    origin = {"base_hash": base.strict, "adapter_hash": adapter_hash(model)}
    # the records depend on all of these: a later call goes on only with the same
    settings = {
        **origin,
        "--max_new_tokens": max_new_tokens,
        "--max_length": config.max_length,
        "--text_column": config.text_column,
        "--prompt_column": config.prompt_column,
        "--num_prompts": num_prompts,
        "--seed": seed,
    }
    if has_template(tokenizer):
        begun = read_progress(output).get("settings", {})
        if _DATE in begun:  # the prompts of an earlier day
            fix_date(tokenizer, str(begun[_DATE]))
        settings[_DATE] = date_of(tokenizer)
    prompts = read_prompts(data, tokenizer, config, length=length, seed=seed)
    first = next(prompts, None)  # fail before making the file
    if first is None:
        raise DataError(
            "the data give no prompt of two tokens or more; check --prompt, or --dataset_name and"
            " its columns"
        )
    prompts = itertools.islice(itertools.chain([first], prompts), num_prompts)
    ends = end_ids(model, tokenizer)
    with evaluating(model), Output(output, settings) as file, StopOnSignal() as stop:
        figures = file.figures
        resumed = figures.prompts
        _skip(prompts, figures, output)
        while stop.number is None:
            batch = list(itertools.islice(prompts, batch_size))
            if not batch:
                break
            comparisons = compare_prompts(model, batch, max_new_tokens, ends)
            # the student writes only where it would differ
            differing = _differing(comparisons)
            texts = _student_completions(model, differing, max_new_tokens, ends)
            records = []
            for comparison, text in zip(differing, texts, strict=True):
                records.append({**_record(tokenizer, comparison, text), **origin})
            figures = _added(figures, comparisons)
            file.commit(records, figures)
            report(figures.prompts)
        # after a signal the progress stays, for the next call
        if stop.number is None:
            file.finish()
    tokens = max(1, figures.tokens)
    return CollectResult(
        output=output,
        prompts=figures.prompts,
        disagreements=figures.disagreements,
        tokens=figures.tokens,
        resumed=resumed,
        top1=figures.top1_sum / tokens,
        kl=figures.kl_sum / tokens,
        acceptance=figures.acceptance_sum / tokens,
        signal=stop.number,
    )


def _added(figures: Compared, comparisons: Sequence[Comparison]) -> Compared:
    """Return the figures with those of further prompts."""
    per_token = torch.cat([c.figures for c in comparisons])
    sums = per_token.sum(dim=0).tolist()
    digest = figures.prompts_sha256
    for comparison in comparisons:
        digest = _digest_after(digest, comparison.prompt)
    return Compared(
        prompts=figures.prompts + len(comparisons),
        disagreements=figures.disagreements + len(_differing(comparisons)),
        tokens=figures.tokens + sum(len(c.completion) for c in comparisons),
        top1_sum=figures.top1_sum + sums[_TOP1],
        kl_sum=figures.kl_sum + sums[_KL],
        acceptance_sum=figures.acceptance_sum + sums[_ACCEPTANCE],
        prompts_sha256=digest,
    )


def _skip(prompts: Iterator[Sample], figures: Compared, output: Path) -> None:
    """Pass over the prompts of earlier calls; raise ConfigError if they are not the same."""
    digest = ""
    for prompt in itertools.islice(prompts, figures.prompts):
        digest = _digest_after(digest, prompt)
    if digest != figures.prompts_sha256:
        raise ConfigError(
            f"--output {output} was begun with other prompts: use the data of the earlier command,"
            " or choose another file"
        )


def _digest_after(digest: str, prompt: Sample) -> str:
    """Return the hash of the prompts up to this one, from that of those before it."""
    return hashlib.sha256(f"{digest} {list(prompt.input_ids)}".encode()).hexdigest()


def _differing(comparisons: Sequence[Comparison]) -> list[Comparison]:
    return [c for c in comparisons if c.position is not None]


def _student_completions(
    model: PreTrainedModel,
    differing: Sequence[Comparison],
    max_new_tokens: int,
    ends: frozenset[int],
) -> list[tuple[int, ...]]:
    """Return what the student writes after each prompt: the teacher's tokens up to the first
    difference, its own token there, and how it goes on.
    """
    starts = [c.student_start for c in differing]
    begun = [(*c.prompt.input_ids, *c.student_start) for c in differing]
    limits = [0 if start[-1] in ends else max_new_tokens - len(start) for start in starts]
    names = [c.prompt.id for c in differing]
    with adapter_mode(model, "student"):
        rests = continue_greedily(model, begun, limits, ends, names)
    return [(*start, *rest) for start, rest in zip(starts, rests, strict=True)]


def _record(tokenizer: Any, c: Comparison, by_student: Sequence[int]) -> dict[str, Any]:
    assert c.position is not None
    prompt = c.prompt.input_ids
    at = c.figures[c.position]
    return {
        "id": c.prompt.id,
        "prompt": tokenizer.decode(list(prompt), skip_special_tokens=True),
        "completion": continuation_text(tokenizer, prompt, c.completion),
        "student": continuation_text(tokenizer, prompt, by_student),
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
