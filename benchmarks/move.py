"""Move tasks: how much of what five examples give remains if only a code, or a state, is moved.

    python benchmarks/move.py --data FOLDER [--model FOLDER_OR_FILE.gguf] [--tasks NAME,...]
        [--students K/R/Q,... | --adapter FOLDER] [--queries 100] [--out FILE] [--json]

FOLDER has a file NAME.json for each task: a list of {"input": ..., "output": ...}, as in the data
of Todd et al. (2024, arXiv:2310.15213). A prompt is "Q: input\\nA:", after examples of the same
form or alone. A query is right if the most probable next token is the first one of its output.

    none                the query alone
    examples            five examples before it, drawn for each query
    added               the query alone; the code of five examples (npt.context_code, the mean over
                        other queries) is added at its last token
    replaced            the mean code of other queries in context takes the place of the token's own
    hidden_state        the mean hidden state of other queries in context takes the place of the
                        last token's, after one layer (Hendel et al. 2023, arXiv:2310.15916)
    function_vector     the mean outputs of the attention heads that restore most of the answer
                        after examples with shuffled outputs are added after one layer (Todd et al.)
    written             the query alone, after `npt.consolidate`'s update wrote the five examples of
                        other queries into the weights, at a penalty of 1e4
    kept                `added` with the largest numbers of the code alone, over all layers together
    fewest              the fewest of these with which the accuracy of `added` is down by at most 5%

Rows of the base have the two methods that need no student. Their layer, and `fewest`, are chosen by
as many other queries as are measured. Students K/R/Q are closed-form starts, as in real.py. Each
row is written to --out at once; rows of other students and tasks in the file are kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import npt
from fetch_model import fetched
from npt.adapters.consolidate import Consolidation, applied
from npt.adapters.converted import decoder_layers
from npt.console import complain, put, silent_console
from npt.data.continuation import continuation_tokens, prompt_tokens
from npt.errors import ConfigError, DataError, NPTError
from npt.files import to_json, write_json
from npt.stored import read_bytes
from npt.tools.editing.context_code import ContextCode
from npt.tools.editing.layerwise import Rows, moment_factors, opened, solve, wanted_outputs
from npt.tools.editing.probes import Probe
from npt.tools.editing.write import layers_to_patch
from real import QUANTIZATION, named, rows_in
from real_text import read_text
from tables import moved as markdown
from this_machine import code_hash, machine

EXAMPLES = 5
"""Examples before a query."""
MEAN_OVER = 20
"""Queries that a moved code or state is a mean over."""
HEADS = 10
"""Heads of a function vector, as Todd et al. use for a model of 6 B parameters."""
SHUFFLED = 10
"""Prompts with shuffled outputs that a head's effect is a mean over."""
LAYERS_AT_ONCE = 10
"""Layers whose heads are tried in one batch."""
PENALTY = 1e4
"""Tokens of general text that weigh as much as one of a query whose examples are written."""
ENOUGH = 0.95
"""Share of the accuracy of `added` that `fewest` keeps."""

Pair = tuple[str, str]
"""Input and output."""


@dataclass(frozen=True)
class Question:
    """A prompt and the id of the token that should follow."""

    ids: list[int]
    answer: int


class MoveTask:
    """The pairs of a task, divided: queries to measure, queries to choose by, and others.

    Attributes:
        measured, choosing: `queries` pairs each.
        moved_from: pairs whose codes or states in context are averaged.
    """

    def __init__(self, name: str, pairs: Sequence[Pair], tokenizer: Any, queries: int, seed: int):
        self.name, self._tokenizer, self._seed = name, tokenizer, seed
        order = list(dict(pairs).items())  # an input once
        random.Random(f"{seed}/{name}").shuffle(order)
        needed = 2 * queries + MEAN_OVER + EXAMPLES
        if len(order) < needed:
            raise DataError(
                f"task {name} has {len(order)} pairs, {needed} are needed: lower --queries"
            )
        self.measured, order = order[:queries], order[queries:]
        self.choosing, self._others = order[:queries], order[queries:]
        self.moved_from = self._others[:MEAN_OVER]

    def alone(self, pair: Pair) -> Question:
        """Return a query without examples."""
        return self._question([], pair)

    def in_context(self, pair: Pair, *, shuffled: bool = False) -> Question:
        """Return a query after its five examples, which no measured query is among.

        shuffled: every example has the output of another one.
        """
        draws = random.Random(f"{self._seed}/{self.name}/{pair[0]}")
        examples = draws.sample([other for other in self._others if other != pair], EXAMPLES)
        if shuffled:
            outputs = [output for _, output in examples]
            examples = [
                (example[0], output)
                for example, output in zip(examples, [*outputs[1:], outputs[0]], strict=True)
            ]
        return self._question(examples, pair)

    def _question(self, examples: Sequence[Pair], pair: Pair) -> Question:
        shown = "".join(f"Q: {input}\nA: {output}\n\n" for input, output in examples)
        prompt = f"{shown}Q: {pair[0]}\nA:"
        answer = continuation_tokens(self._tokenizer, prompt, f" {pair[1]}")[0]
        return Question(prompt_tokens(self._tokenizer, prompt), answer)


def read_task(folder: Path, name: str) -> list[Pair]:
    """Return the pairs of a task; raise DataError if its file is not a list of them."""
    path = folder / f"{name}.json"
    try:
        rows = json.loads(read_bytes(path))
        return [(str(row["input"]), str(row["output"])) for row in rows]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check --data") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is not a list of inputs and outputs; check --data") from error


class Batch:
    """Questions as rows that end together, which padding on the left does not change."""

    def __init__(self, questions: Sequence[Question], device: Any):
        self.width = max(len(question.ids) for question in questions)
        missing = [self.width - len(question.ids) for question in questions]
        rows = [[q.ids[0]] * n + q.ids for q, n in zip(questions, missing, strict=True)]
        mask = [[0] * n + [1] * (self.width - n) for n in missing]
        self.inputs = {
            "input_ids": torch.tensor(rows, device=device),
            "attention_mask": torch.tensor(mask, device=device),
            "use_cache": False,
        }
        self.answers = torch.tensor([question.answer for question in questions], device=device)

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """Return the share of questions that the model answers."""
        logits = model(**self.inputs, logits_to_keep=1).logits[:, -1]
        return float((logits.argmax(dim=-1) == self.answers).double().mean())


@contextmanager
def last_token(layer: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the context, change the last token's hidden state [B, D] after a layer."""

    def hook(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[:, -1] = change(output[:, -1])
        return output

    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def means_in_context(model: Any, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Return by layer the means over rows at the last token: of the hidden state after the layer
    [D], and of the heads' outputs, which o_proj reads [H * head size].
    """
    states: list[Tensor] = []
    heads: list[Tensor] = []
    layers: list[Any] = list(decoder_layers(model))
    with ExitStack() as stack:
        for layer in layers:
            for handle in (
                layer.register_forward_hook(lambda *call: states.append(call[2][:, -1].mean(0))),
                layer.self_attn.o_proj.register_forward_pre_hook(
                    lambda _, inputs: heads.append(inputs[0][:, -1].mean(0))
                ),
            ):
                stack.callback(handle.remove)
        model.model(**batch.inputs)
    return states, heads


@torch.no_grad()
def head_effects(model: Any, questions: Sequence[Question], means: Sequence[Tensor]) -> Tensor:
    """Return by layer and head [L, H] the rise of the answer's probability if the head's output at
    the last token is its mean, averaged over questions with shuffled outputs.
    """
    count = model.config.num_attention_heads
    layers: list[Any] = list(decoder_layers(model))
    device = next(model.parameters()).device
    effects = torch.zeros(len(layers), count)

    def probabilities(cache: Any, question: Question, chunk: Sequence[int]) -> Tensor:
        """Answer the question once for each head of the chunk; row by row one head is replaced."""
        rows = max(1, len(chunk) * count)
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(rows)

        def replace(start: int, mean: Tensor, _module: Any, inputs: Any) -> tuple[Tensor]:
            mixed = inputs[0].clone()
            for head, size in enumerate([len(mean) // count] * count):
                part = slice(head * size, (head + 1) * size)
                mixed[start + head, -1, part] = mean[part]
            return (mixed,)

        with ExitStack() as stack:
            for number, index in enumerate(chunk):
                hook = partial(replace, number * count, means[index])
                handle = layers[index].self_attn.o_proj.register_forward_pre_hook(hook)
                stack.callback(handle.remove)
            last = torch.tensor([[question.ids[-1]]] * rows, device=device)
            logits = model(last, past_key_values=cache, use_cache=True).logits[:, -1]
        return logits.float().softmax(dim=-1)[:, question.answer].cpu()

    for question in questions:
        before = torch.tensor([question.ids[:-1]], device=device)
        cache = model(before, use_cache=True, logits_to_keep=1).past_key_values
        (plain,) = probabilities(cache, question, [])
        for first in range(0, len(layers), LAYERS_AT_ONCE):
            chunk = range(first, min(first + LAYERS_AT_ONCE, len(layers)))
            found = probabilities(cache, question, chunk).view(len(chunk), count)
            effects[first : first + len(chunk)] += (found - plain) / len(questions)
    return effects


@torch.no_grad()
def function_vector(model: Any, effects: Tensor, means: Sequence[Tensor]) -> Tensor:
    """Return the sum [D] of the mean outputs of the heads with the largest effects."""
    count = effects.shape[1]
    total: Tensor = torch.zeros(())
    for place in effects.flatten().topk(min(HEADS, effects.numel())).indices.tolist():
        index, head = divmod(place, count)
        size = len(means[index]) // count
        alone = torch.zeros_like(means[index])
        alone[head * size : (head + 1) * size] = means[index][head * size : (head + 1) * size]
        layer: Any = decoder_layers(model)[index]
        total = total + layer.self_attn.o_proj(alone[None])[0]
    return total


def base_row(model: Any, task: MoveTask, measured: Batch, choosing: Batch) -> dict[str, Any]:
    """Return the figures of a task on the base. measured, choosing: the task's queries alone."""
    device = next(model.parameters()).device
    context = Batch([task.in_context(pair) for pair in task.measured], device)
    means = Batch([task.in_context(pair) for pair in task.moved_from], device)
    states, heads = means_in_context(model, means)
    shuffled = [task.in_context(pair, shuffled=True) for pair in task.moved_from[:SHUFFLED]]
    vector = function_vector(model, head_effects(model, shuffled, heads), heads)
    changes: dict[str, list[Callable[[Tensor], Tensor]]] = {
        "hidden_state": [partial(lambda state, now: state.expand_as(now), s) for s in states],
        "function_vector": [lambda now: now + vector] * len(states),
    }
    figures = {"none": measured.accuracy(model), "examples": context.accuracy(model)}
    chosen = {}
    for method, by_layer in changes.items():

        def accuracy(batch: Batch, index: int, by_layer: Any = by_layer) -> float:
            with last_token(decoder_layers(model)[index], by_layer[index]):
                return batch.accuracy(model)

        best = max(range(len(states)), key=partial(accuracy, choosing))
        chosen[method] = best
        figures[method] = accuracy(measured, best)
    return {"figures": figures, "layers": chosen}


def written(model: Any, task: MoveTask, measured: Batch, factors: dict[int, Tensor]) -> float:
    """Return the accuracy if what the examples change is written into the weights.

    factors: `moment_factors`, [F, F] by layer.
    """
    probes = []
    for pair in task.moved_from:
        read, (first, *tail) = task.in_context(pair).ids, task.alone(pair).ids
        probes.append(Probe(tuple(read[: -len(tail)]), (first,), tuple(tail)))
    rows = Rows(probes, [], [])
    layers = tuple(factors)
    streams = list(opened(model, rows.alone(), min(layers)))
    wanted = wanted_outputs(model, rows, streams, layers, common=0)
    update = Consolidation(solve(model, streams, wanted, factors, PENALTY))
    with applied(model, update):
        return measured.accuracy(model)


def student_row(model: Any, task: MoveTask, measured: Batch, choosing: Batch) -> dict[str, Any]:
    """Return the figures of a task on the student attached to the model."""
    device = next(model.parameters()).device
    context = Batch([task.in_context(pair) for pair in task.measured], device)
    in_context = [task.in_context(pair).ids for pair in task.moved_from]
    alone = [task.alone(pair).ids for pair in task.moved_from]
    code = npt.context_code(model, zip(in_context, alone, strict=True))
    codes = [npt.modulation_of(model, ids).codes for ids in in_context]
    mean = ContextCode({i: torch.stack([c[i] for c in codes]).mean(dim=0).cpu() for i in codes[0]})

    def accuracy(batch: Batch, code: ContextCode | None = None, *, add: bool = True) -> float:
        given: AbstractContextManager[None] = nullcontext()
        if code is not None:
            given = npt.transplanted(model, code, batch.width - 1, add=add)
        with given:
            return batch.accuracy(model)

    figures = {
        "none": accuracy(measured),
        "examples": accuracy(context),
        "added": accuracy(measured, code),
        "replaced": accuracy(measured, mean, add=False),
    }
    total = sum(code.numbers().values())
    counts = [1 << power for power in range(2, 20) if 1 << power < total]
    kept = [
        {"numbers": count, "accuracy": accuracy(measured, largest(code, count))} for count in counts
    ]
    enough = ENOUGH * accuracy(choosing, code)
    fewest = next(
        (i for i, n in enumerate(counts) if accuracy(choosing, largest(code, n)) >= enough), None
    )
    whole = {"numbers": total, "accuracy": figures["added"]}
    return {
        "figures": figures,
        "layers": len(code.codes),
        "kept": [*kept, whole],
        "fewest": whole if fewest is None else kept[fewest],
    }


def largest(code: ContextCode, count: int) -> ContextCode:
    """Return the code with its largest numbers alone, over all layers together.

    With a token part the numbers are in nats, and so comparable between layers.
    """
    sizes = torch.cat([values.abs() for values in code.codes.values()])
    least = sizes.topk(count).values[-1]
    return ContextCode({i: values * (values.abs() >= least) for i, values in code.codes.items()})


@dataclass
class Bench:
    """The base, and the settings of all rows."""

    model: Any
    tokenizer: Any
    tasks: list[MoveTask]
    args: argparse.Namespace

    def __post_init__(self) -> None:
        self.code = code_hash()
        vocab_size = self.model.config.vocab_size
        self.text = read_text(self.args.text, self.tokenizer, vocab_size, seed=self.args.seed)

    def rows(self, student: str) -> Iterator[dict[str, Any]]:
        """Yield the row of each task for a student, "base" or sizes K/R/Q, or for --adapter."""
        model, started = self.model, time.perf_counter()
        made: dict[str, Any] = {"student": student}
        if student != "base":
            made |= self._attach(student)
            made["start_minutes"] = (time.perf_counter() - started) / 60
        try:
            count = max(1, self.args.tokens // self.text.length)
            factors = moment_factors(model, self.text.fitted[:count], layers_to_patch(model, None))
            for task in self.tasks:
                complain(f"{student}: {task.name}")
                measure = base_row if student == "base" else student_row
                device = next(model.parameters()).device
                measured, choosing = (
                    Batch([task.alone(pair) for pair in pairs], device)
                    for pairs in (task.measured, task.choosing)
                )
                found = measure(model, task, measured, choosing)
                found["figures"]["written"] = written(model, task, measured, factors)
                ended = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                yield {**made, "task": task.name, **found, "code": self.code, "ended": ended}
        finally:
            if student != "base":
                npt.detach(model)

    def _attach(self, student: str) -> dict[str, Any]:
        """Attach the student and return its form."""
        if self.args.adapter is not None:
            npt.load_adapter(self.model, self.args.adapter)
            return {}
        config = named(student).config(self.model.config)
        npt.attach(self.model, config, seed=self.args.seed)
        report = npt.calibrate(
            self.model,
            self.tokenizer,
            self.text.fitted,
            self.args.tokens,
            batch_size=2,
            seed=self.args.seed,
            console=silent_console(),
        )
        sizes = {"rank": config.rank, "active": config.active, "token_rank": config.token_rank}
        return {**sizes, "start_tokens": report.tokens}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with a file for each task")
    parser.add_argument(
        "--model", help="folder, GGUF file or Hub id (default: the model of fetch_model.py)"
    )
    parser.add_argument(
        "--adapter", help="folder of a saved adapter, measured in place of --students"
    )
    parser.add_argument(
        "--students",
        default="base,16/4/4,4/2/4",
        help="base, and sizes K/R/Q as in real.py (default: %(default)s)",
    )
    parser.add_argument(
        "--tasks",
        default="present-past,singular-plural,capitalize",
        help="names of files (default: %(default)s)",
    )
    parser.add_argument(
        "--queries", type=int, default=100, help="queries to measure (default: %(default)s)"
    )
    parser.add_argument(
        "--text", default="builtin-prose", help="text of the starts (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=49152, help="tokens of a start (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/move.json"))
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        students: Iterable[str] = args.students.split(",")
        if args.adapter is not None:
            students = [args.adapter]
        else:
            for student in set(students) - {"base"}:
                named(student)
        if args.queries < 1:
            raise ConfigError(f"--queries is {args.queries}; it must be at least 1")
        tasks = {name: read_task(args.data, name) for name in args.tasks.split(",")}
        name = args.model if args.model is not None else str(fetched())
        model, tokenizer = npt.load_base(name, quantization=QUANTIZATION)
        about = {
            "model": Path(name).name,
            "quantization": QUANTIZATION,
            "data": args.data.name,
            "queries": args.queries,
            "examples": EXAMPLES,
            "mean_over": MEAN_OVER,
            "seed": args.seed,
            "machine": machine(next(model.parameters()).device),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        same = {name: about[name] for name in ("model", "queries", "seed", "data")}
        earlier = rows_in(args.out, same, "move.py")
        rows = {(row["student"], row["task"]): row for row in earlier}
        chosen = [
            MoveTask(task, pairs, tokenizer, args.queries, args.seed)
            for task, pairs in tasks.items()
        ]
        bench = Bench(model, tokenizer, chosen, args)
        figures: dict[str, Any] = {}
        for student in students:
            for row in bench.rows(student):
                rows[student, row["task"]] = row
                figures = {**about, "rows": list(rows.values())}
                write_json(args.out, figures)
    except (NPTError, OSError) as error:
        complain(f"move.py: {error}")
        return getattr(error, "exit_status", 2)
    put(to_json(figures) if args.json else markdown(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
