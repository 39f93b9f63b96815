"""lm-evaluation-harness on views of one model: teacher, floor and student. The package (extra
`eval`) is needed only when this is called.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import attached_config, evaluating
from npt.errors import ConfigError, DataError, first_line
from npt.evaluation.evaluate import MODES
from npt.evaluation.view import mode_view
from npt.extras import require

Results = dict[str, dict[str, dict[str, float]]]
"""Of each model, of each task: metrics by name (`<metric>,<filter>` after another filter than the
default), their standard errors as `<metric>_se`, and `samples`."""


def find_tasks(tasks: Sequence[str], tasks_path: str | Path | None = None) -> Any:
    """Return the harness's task manager if it has all tasks, groups or tags; nothing is downloaded.

    Args:
        tasks: their names.
        tasks_path: folder of YAML tasks (which may run Python code next to them), then the only
            ones; default the harness's own, whose data come from the hub.

    Raises:
        ConfigError: the package is missing, there is no such folder, or no such task.
    """
    if not tasks:
        raise ConfigError("--lm_eval names no task; write names with commas between them")
    if tasks_path is not None and not Path(tasks_path).is_dir():
        raise ConfigError(f"--lm_eval_tasks_path {tasks_path} is no folder of YAML tasks")
    require("lm_eval", "--lm_eval")
    path = None if tasks_path is None else str(tasks_path)
    with _quiet():
        manager = import_module("lm_eval.tasks").TaskManager(
            include_path=path, include_defaults=path is None
        )
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"--lm_eval names the task {unknown[0]!r}, which {path or 'lm-evaluation-harness'} does"
            " not have"
        )
    return manager


def lm_eval(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    tasks_path: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> Results:
    """Return scores of teacher, floor and student on tasks of lm-evaluation-harness.

    Args:
        model: with adapters attached; not changed.
        tasks: names, as for `find_tasks`.
        tasks_path: as for `find_tasks`.
        limit: documents of each task, at most.

    Raises:
        ConfigError: as `find_tasks`.
        DataError: a task's data cannot be read.
    """
    attached_config(model)
    manager = find_tasks(tasks, tasks_path)
    evaluate = import_module("lm_eval.evaluator").simple_evaluate
    adapter = import_module("lm_eval.models.huggingface").HFLM
    tokenizer = copy.deepcopy(tokenizer)  # the harness changes it, and has its padding looked up
    if (tokenizer.pad_token_id or 0) >= model.config.vocab_size:
        tokenizer.pad_token = None
    scores: Results = {}
    with evaluating(model), _quiet():
        try:
            manager.load(list(tasks))
        except Exception as error:  # data libraries raise anything
            raise DataError(
                f"the data of --lm_eval {','.join(tasks)} cannot be read: {first_line(error)[:300]}"
            ) from error
        for mode in MODES:
            view = mode_view(model, mode)
            with torch.random.fork_rng():
                run = evaluate(
                    model=adapter(pretrained=view, tokenizer=tokenizer, batch_size=batch_size),
                    tasks=list(tasks),
                    task_manager=manager,
                    limit=limit,
                )
            scores[mode] = {task: _figures(values) for task, values in run["results"].items()}
    return scores


def _figures(values: dict[str, Any]) -> dict[str, float]:
    """Return {"acc": 0.5, "acc_se": 0.1, "samples": 20} for the harness's {"acc,none": 0.5,
    "acc_stderr,none": 0.1, "sample_len": 20}.
    """
    figures: dict[str, float] = {}
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if kind:
            tail = "" if kind == "none" else f",{kind}"
            tail += "_se" if name.endswith("_stderr") else ""
            number = float(value) if isinstance(value, int | float) else math.nan
            figures[f"{name.removesuffix('_stderr')}{tail}"] = number
    if isinstance(values.get("sample_len"), int):
        figures["samples"] = values["sample_len"]
    return figures


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's notes on the model that it is given: the choice is ours."""
    levels = {name: logging.getLogger(name).level for name in ("lm_eval", "lm-eval")}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
