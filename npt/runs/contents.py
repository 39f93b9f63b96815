"""The files of a run's folder and the keys in them, in words: the page `docs/reference/files.md` is
made of these tables.
"""

from __future__ import annotations

RUN_FOLDER = {
    "run.json": (
        "resolved settings, versions, seed, the base's hash (of every byte) and its parts, the"
        " precision found on the modules, and under `deterministic` whether every step can be"
        " expected to repeat its bits"
    ),
    "metrics.jsonl": "one object per logged step; its keys are below",
    "events.jsonl": "one object per start, refusal, warning, save, evaluation, signal and end",
    "checkpoints/step-XXXXXXXX/": "states that `--resume` continues from; the files are below",
    "adapter/": (
        "the student that the run ended with; `npt.from_pretrained(folder)` loads it with its base"
    ),
    "best/": (
        "with `--eval_steps`: the adapter of the lowest held-out KL (perplexity, if it learns"
        " completions), and its figures"
    ),
    "fidelity.json": (
        "`teacher`, `floor`, `initial` and `student`: perplexity, its ratio to the teacher's, KL,"
        " top-1 agreement and acceptance, each with its standard error under `<key>_se`; `layers`;"
        " `positions`, the student's by position. Shares are fractions of 1, which tables and"
        " pages write in per cent"
    ),
    "modulation.json": "measured at the end: the multipliers and additive terms, by layer",
    "report.html": (
        "the run as one page that needs no network; `npt report` writes it again for any run, a"
        " killed or a running one too"
    ),
    "trace/": (
        "with `--trace_steps` or `--trace_every`: a record of a step's tensors per file, and"
        " pictures of them all"
    ),
    "postmortem/step-XXXXXXXX/": "of a run that gave up, for `npt replay`; the files are below",
}
"""What a run leaves in its folder."""

CHECKPOINT = {
    "adapter/adapter_model.safetensors": "the adapters, fp32",
    "adapter/adapter_config.json": "their form, and the base that they belong to",
    "adapter/README.md": "a model card",
    "state.safetensors": "AdamW's moments and the random state",
    "state.json": "counters, position in the data, settings",
    "manifest.json": "the sha256 of every file and of itself",
}
"""Files of a checkpoint. Nothing that is loaded can run code."""

POSTMORTEM = {
    **CHECKPOINT,
    "window.safetensors": "the micro-batches of the last window",
    "postmortem.json": (
        "refusals, last losses, schedule, settings, precision, and record and trace of the refused"
        " micro-batch"
    ),
}
"""Files of a post-mortem: a checkpoint's, as the last window found them, and two more."""

METRICS = {
    "step": "optimizer steps so far",
    "loss": "mean per valid token over the window, never a sum over micro-batches",
    "loss_nmse": "NMSE, whatever the loss is; absent at `--hidden_weight 0`",
    "loss_reg": "the regularisation, before its weight",
    "loss_<name>": "with `--logit_kl_weight`: the loss on the logits, mean per predicted token",
    "grad_norm": "global gradient norm, before clipping",
    "lr": "learning rate of the step",
    "tokens": "valid tokens so far",
    "tokens_per_second": "since the line before",
    "refused_total": "micro-batches refused so far",
    "refused.<kind>": "the same, by the kind of refusal",
    "layers.<i>.nmse": "NMSE of each converted layer; absent at `--hidden_weight 0`",
}
"""Keys of a line of metrics.jsonl. A number that is not finite is written as null."""
