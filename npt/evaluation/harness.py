"""lm-evaluation-harness on teacher, floor and student, through its Python API.

The harness takes any transformers model, so each of the three is a view of the one attached model.
The package (extra `eval`) is needed only when this is called.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.attach import attached_config
from npt.adapters.layer import Mode
from npt.errors import ConfigError, DataError, first_line
from npt.evaluation.view import mode_view
from npt.extras import install_command

MODES: tuple[Mode, ...] = ("teacher", "floor", "student")

Results = dict[str, dict[str, dict[str, float]]]
"""Of each model, of each task: metrics by name, their standard errors as `<metric>_se`, NaN where
the harness gives none, and `samples`. A metric behind another filter than the harness's default is
named `<metric>,<filter>`."""


def find_tasks(tasks: Sequence[str], tasks_path: str | Path | None = None) -> Any:
    """The harness's task manager, once all tasks are found; nothing is downloaded and no model
    needed.

    Args:
        tasks: names of tasks, groups or tags.
        tasks_path: folder of YAML tasks. Where it is given only these are known; else the harness's
            own, whose data come from the hub. A YAML task may name Python functions beside it,
            which are run.

    Raises:
        ConfigError: the package is missing, there is no such folder, or no such task.
    """
    if not tasks:
        raise ConfigError("--lm_eval names no task; write names with commas between them")
    if tasks_path is not None and not Path(tasks_path).is_dir():
        raise ConfigError(
            f"--lm_eval_tasks_path {tasks_path} is no folder; name the one that holds the YAML"
            " tasks"
        )
    try:
        manager = import_module("lm_eval.tasks").TaskManager
    except ImportError as error:
        raise ConfigError(
            f"--lm_eval needs lm-evaluation-harness ({error}); install it with:"
            f" {install_command('eval')}"
        ) from error
    with _quiet():
        found = manager(
            include_path=None if tasks_path is None else str(tasks_path),
            include_defaults=tasks_path is None,
        )
    unknown = [task for task in tasks if task not in found.all_tasks]
    if unknown:
        where = "lm-evaluation-harness" if tasks_path is None else tasks_path
        known = (
            f"; there are: {', '.join(found.all_tasks[:20]) or 'none'}"
            if tasks_path is not None
            else ""
        )
        raise ConfigError(
            f"--lm_eval names the task {unknown[0]!r}, which {where} does not have{known}"
        )
    return found


def lm_eval(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    tasks_path: str | Path | None = None,
    modes: Sequence[Mode] = MODES,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> Results:
    """Scores of teacher, floor and student on tasks of lm-evaluation-harness.

    Args:
        model: with adapters attached; left as it was.
        tokenizer: of the base model.
        tasks, tasks_path: as for `find_tasks`.
        modes: which models.
        num_fewshot: examples in front of each question; default the task's own.
        limit: documents of each task, at most.
        batch_size: of the harness.
        seed: of the choice of examples, and of whatever a task draws.

    Raises:
        ConfigError: as `find_tasks`.
        DataError: a task's data cannot be read.
        ModelError: no adapters are attached.
    """
    attached_config(model)
    manager = find_tasks(tasks, tasks_path)
    evaluate, adapter = (
        import_module("lm_eval.evaluator").simple_evaluate,
        import_module("lm_eval.models.huggingface").HFLM,
    )
    seeds = dict.fromkeys(
        ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), seed
    )
    in_training = [module for module in model.modules() if module.training]
    found: Results = {}
    try:
        with _quiet():
            try:
                manager.load(list(tasks))
            except Exception as error:  # whatever the data library brings up
                raise DataError(
                    f"the data of --lm_eval {','.join(tasks)} cannot be read:"
                    f" {first_line(error)[:300]}"
                ) from error
        for mode in modes:
            with _quiet(), torch.random.fork_rng():
                results = evaluate(
                    model=adapter(
                        pretrained=mode_view(model, mode),
                        tokenizer=tokenizer,
                        batch_size=batch_size,
                    ),
                    tasks=list(tasks),
                    task_manager=manager,
                    num_fewshot=num_fewshot,
                    limit=limit,
                    log_samples=False,
                    **seeds,
                )["results"]
            found[mode] = {task: _figures(values) for task, values in results.items()}
    finally:
        for module in in_training:
            module.training = True
    return found


def _figures(values: dict[str, Any]) -> dict[str, float]:
    """{"acc": 0.5, "acc_se": 0.1, "samples": 20} from the harness's {"acc,none": 0.5,
    "acc_stderr,none": 0.1, "sample_len": 20}.
    """
    found: dict[str, float] = {}
    for key, value in values.items():
        name, _, kind = key.partition(",")
        if not kind:
            continue
        tail = "" if kind == "none" else f",{kind}"
        metric, error = (
            (name.removesuffix("_stderr"), "_se") if name.endswith("_stderr") else (name, "")
        )
        found[f"{metric}{tail}{error}"] = (
            float(value) if isinstance(value, int | float) else math.nan
        )
    if isinstance(values.get("sample_len"), int):
        found["samples"] = values["sample_len"]
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness's notes on the model that it was handed off: the choice was ours."""
    loggers = [logging.getLogger("lm_eval"), logging.getLogger("lm-eval")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
