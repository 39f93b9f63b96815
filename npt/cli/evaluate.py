"""`npt evaluate`."""

from __future__ import annotations

import argparse
from typing import Any

from npt.cli.arguments import (
    add_adapter,
    add_any_base,
    base_config,
    load,
    load_adapter,
    natural,
    positive,
    with_adapter,
)
from npt.config import BaseConfig, DataConfig
from npt.console import make_console
from npt.errors import ConfigError
from npt.flags import add_settings, build

PRECISIONS = ("fp32", "bf16", "fp16")

NEW_TOKENS = 64
"""Of a greedy continuation, by default."""


def evaluate(given: dict[str, Any]) -> int:
    """Measure a saved adapter against its teacher and its floor."""
    given = with_adapter(given)
    base, data = base_config(given), build(DataConfig, given)
    import npt
    from npt.data.batch import pad_id_of
    from npt.data.source import check_source, open_source, own_heldout
    from npt.evaluation.attribution import reference_outputs
    from npt.evaluation.harness import find_tasks, lm_eval
    from npt.evaluation.heldout import evaluation_samples
    from npt.evaluation.table import print_fidelity, print_scores
    from npt.files import to_json

    console = make_console(stderr=given["json"])
    check_source(data)
    tasks = (
        [name for name in (given["lm_eval"] or "").split(",") if name.strip()]
        if given["lm_eval"] is not None
        else None
    )
    if tasks is not None:
        find_tasks(tasks, given["lm_eval_tasks_path"])
    elif given["lm_eval_tasks_path"] is not None or given["lm_eval_limit"] is not None:
        raise ConfigError(
            "--lm_eval_tasks_path and --lm_eval_limit mean nothing without --lm_eval; name the"
            " tasks, or drop them"
        )
    if given["max_new_tokens"] is not None and not given["divergence_prompts"]:
        raise ConfigError(
            f"--max_new_tokens is {given['max_new_tokens']}, and nothing is continued without"
            " --divergence_prompts; add it or drop this"
        )
    if given["attribution"] is not None:
        _check_attribution(base)
    own = own_heldout(data)

    def samples_of(model: Any, tokenizer: Any) -> tuple[list[Any], bool]:
        records = own if own is not None else open_source(data)
        return evaluation_samples(
            records, tokenizer, data, given["eval_samples"], model.config.vocab_size, own
        )

    reference, memory = None, {}
    if given["attribution"] is not None:
        model, tokenizer = _load_unquantized(base, given["attribution"])
        memory["unquantized_model_bytes"] = sum(
            p.numel() * p.element_size() for p in model.parameters()
        )
        reference = reference_outputs(
            model,
            samples_of(model, tokenizer)[0],
            batch_size=given["batch_size"],
            pad_id=pad_id_of(tokenizer),
        )
        memory |= {
            "kept_state_bytes": reference.state_bytes,
            "kept_head_bytes": reference.head_bytes,
        }
        console.print(_memory_line(memory, given["attribution"]), soft_wrap=True)
        del model  # before the 4-bit base is loaded; the reference holds its head
    model, tokenizer = load(base, console)
    _, other = load_adapter(model, given, console)
    samples, heldout = samples_of(model, tokenizer)
    fidelity = npt.evaluate(
        model,
        tokenizer,
        samples,
        batch_size=given["batch_size"],
        divergence_prompts=given["divergence_prompts"],
        max_new_tokens=NEW_TOKENS if given["max_new_tokens"] is None else given["max_new_tokens"],
        unquantized=reference,
    )
    scores = None
    if tasks is not None:
        how = {"limit": given["lm_eval_limit"], "batch_size": given["batch_size"]}
        scores = lm_eval(model, tokenizer, tasks, tasks_path=given["lm_eval_tasks_path"], **how)
    if given["json"]:
        further = ({"attribution_memory": memory} if memory else {}) | (
            {"lm_eval": scores} if scores is not None else {}
        )
        print(to_json({**fidelity.as_dict(), **further, "heldout": heldout, **other}, indent=2))
    else:
        print_fidelity(fidelity, console, "held-out" if heldout else "TRAINING")
        if scores is not None:
            print_scores(scores, console)
    return 0


def _check_attribution(base: BaseConfig) -> None:
    """Refuse what has no unquantised original, or nothing that it is the original of."""
    from npt.base.load import read_config

    if getattr(read_config(base.model_name), "quantization_config", None) is not None:
        raise ConfigError(
            f"--attribution needs the unquantised original, and {base.model_name} is stored in 4"
            " bit; name its original"
        )
    if base.quantization is None:
        raise ConfigError(
            "--attribution compares a 4-bit base with its original; add --use_quantization, or"
            " drop it"
        )


def _load_unquantized(base: BaseConfig, precision: str) -> tuple[Any, Any]:
    from npt.base.quantization_error import set_matmul_precision
    from npt.diagnostics.headroom import load_variant

    attention = base.attn_implementation
    model, tokenizer = load_variant(base.model_name, precision, attn_implementation=attention)
    set_matmul_precision(base.matmul_precision, model)
    return model, tokenizer


def _memory_line(memory: dict[str, int], precision: str) -> str:
    whole, states, head = (
        f"{memory[key] / 2**20:,.1f} MiB"
        for key in ("unquantized_model_bytes", "kept_state_bytes", "kept_head_bytes")
    )
    return (
        f"attribution: the unquantised base ({precision}, {whole}) ran first and is gone; kept of"
        f" it are final states on the host ({states}) and its head ({head})"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_adapter(parser)
    add_any_base(parser)
    parser.add_argument(
        "--eval_samples",
        type=positive,
        default=64,
        metavar="INT",
        help="samples to evaluate on (default: 64)",
    )
    parser.add_argument(
        "--batch_size",
        type=positive,
        default=8,
        metavar="INT",
        help="samples at a time (default: 8)",
    )
    parser.add_argument(
        "--divergence_prompts",
        type=natural,
        default=0,
        metavar="INT",
        help=(
            "continue the beginnings of so many samples greedily, and see where the student parts"
            " from its teacher (default: 0)"
        ),
    )
    parser.add_argument(
        "--max_new_tokens",
        type=positive,
        metavar="INT",
        help=f"of such a continuation (default: {NEW_TOKENS})",
    )
    parser.add_argument(
        "--attribution",
        nargs="?",
        const=PRECISIONS[0],
        choices=PRECISIONS,
        metavar="PRECISION",
        help=(
            "run the base unquantised first (fp32, bf16 or fp16; default fp32), and say what"
            " quantisation costs and what the conversion"
        ),
    )
    parser.add_argument(
        "--lm_eval",
        metavar="TASKS",
        help="tasks of lm-evaluation-harness, with commas between them (extra: eval)",
    )
    parser.add_argument(
        "--lm_eval_tasks_path",
        metavar="DIR",
        help="folder of YAML tasks; only these are known then",
    )
    parser.add_argument(
        "--lm_eval_limit", type=positive, metavar="INT", help="documents of a task, at most"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of tables"
    )
    add_settings(
        parser,
        BaseConfig,
        DataConfig,
        leave_out=(
            "num_samples",
            "padding_side",
            "dataset_mix",
            "replay_dataset",
            "replay_ratio",
            "shard_base",
            "teacher_precision",
        ),
    )
