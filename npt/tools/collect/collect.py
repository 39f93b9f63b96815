"""Collect prompts on which student and teacher disagree, as training data.

The teacher continues each prompt greedily. If the student would have written a different token, the
prompt becomes a record with the teacher's continuation as its completion. A record holds tokens as
well as texts, because a text does not always encode back to the same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import attached_config, evaluating
from npt.adapters.files.adapter_files import adapter_hash
from npt.adapters.fit import check_length
from npt.base.identity import BaseIdentity, base_identity
from npt.config import DataConfig
from npt.data.batch import IGNORE_INDEX
from npt.data.continuation import continuation_text
from npt.data.source import Record
from npt.errors import ConfigError, DataError
from npt.evaluation.greedy import Comparison, compare_prompts, end_ids
from npt.evaluation.metrics import COLUMNS
from npt.files import to_json
from npt.runs.signals import StopOnSignal
from npt.tools.collect.prompts import read_prompts

_KL, _TOP1, _ACCEPTANCE = (COLUMNS.index(name) for name in ("kl", "top1", "acceptance"))


@dataclass(frozen=True)
class CollectResult:
    """The outcome of a collection.

    Attributes:
        prompts: number of prompts compared.
        disagreements: number of prompts on which the student differs; each is a record.
        tokens: number of tokens in the teacher's continuations of all prompts.
        top1: share of these tokens on which both agree.
        kl: mean KL(teacher, student) over these tokens, nats.
        acceptance: mean speculative acceptance over these tokens.
        signal: number of the signal that ended the collection early, if any.
    """

    output: Path
    prompts: int
    disagreements: int
    tokens: int
    top1: float
    kl: float
    acceptance: float
    signal: int | None = None

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
    batch, so that an interruption loses at most one batch.

    Args:
        data: records with prompts or texts, see `read_prompts`.
        output: a file that does not exist yet or is empty.
        data_config: columns, and the `max_length` of prompt and completion together.
        max_new_tokens: length limit of a continuation.
        num_prompts: compare at most this many; None for all.
        base: `npt.base_identity(model)`, if you have it.
        report: called after every batch with the number of prompts compared.

    Raises:
        ConfigError: the settings do not work together, or the output exists.
        DataError: the data give no prompt.
        NumericalError: logits are not finite.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    config, output = data_config if data_config is not None else DataConfig(), Path(output)
    if output.is_dir() or (output.exists() and output.stat().st_size):
        raise ConfigError(f"--output {output} exists; choose another file or remove it")
    check_length(config.max_length, model.config)
    length = config.max_length - max_new_tokens  # of a prompt, within one sample
    if max_new_tokens < 1 or length < 2:
        raise ConfigError(
            f"--max_new_tokens {max_new_tokens} must be at least 1 and leave room in --max_length"
            f" {config.max_length} for a prompt of two tokens"
        )
    identity = base if base is not None else base_identity(model)
    origin = {"base_hash": identity.strict, "adapter_hash": adapter_hash(model)}
    prompts = read_prompts(data, tokenizer, config, length=length, seed=seed)
    batch = list(itertools.islice(prompts, batch_size))  # fail before making the file
    if not batch:
        raise DataError(
            "the data give no prompt of two tokens or more; check --dataset_name and its columns"
        )
    ends = end_ids(model, tokenizer)
    compared = disagreements = tokens = 0
    sums = torch.zeros(len(COLUMNS), dtype=torch.float64)
    output.parent.mkdir(parents=True, exist_ok=True)
    with evaluating(model), output.open("w", encoding="utf-8") as file, StopOnSignal() as stop:
        while stop.number is None and batch:
            if num_prompts is not None:
                batch = batch[: num_prompts - compared]
            comparisons = compare_prompts(model, batch, max_new_tokens, ends)
            differing = [c for c in comparisons if c.position is not None]
            for comparison in differing:
                file.write(to_json(_record(tokenizer, comparison) | origin) + "\n")
            file.flush()
            compared += len(batch)
            disagreements += len(differing)
            tokens += sum(len(c.completion) for c in comparisons)
            sums += torch.cat([c.figures for c in comparisons]).sum(dim=0)
            report(compared)
            done = num_prompts is not None and compared >= num_prompts
            batch = [] if done else list(itertools.islice(prompts, batch_size))
    top1, kl, acceptance = (float(sums[i]) / max(1, tokens) for i in (_TOP1, _KL, _ACCEPTANCE))
    return CollectResult(output, compared, disagreements, tokens, top1, kl, acceptance, stop.number)


def _record(tokenizer: Any, c: Comparison) -> dict[str, Any]:
    assert c.position is not None
    prompt, at = c.prompt.input_ids, c.figures[c.position]
    return {
        "id": c.prompt.id,
        "prompt": tokenizer.decode(list(prompt), skip_special_tokens=True),
        "completion": continuation_text(tokenizer, prompt, c.completion),
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
