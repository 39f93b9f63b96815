"""Write facts into a model, and compare the update with other ways to edit it.

    python benchmarks/edit.py --text FILE [--facts FILE.jsonl] [--adapter RUN] [--model MODEL]
        [--rows NAME,...] [--max_kl 0.05] [--seed 0] [--out FILE] [--json]

Without --adapter the base itself is edited, in its upper half. --text is general text: C is taken
from its beginning, the bound of the KL is held on other samples, and `kl` is measured on the rest.

    before              nothing is written
    in context          each question after its fact: the most that there is to gain
    one                 the first six facts, each alone in the model; means
    six                 six facts at once
    all                 all facts at once
    cautious            all facts at once with --max_kl 0.006, which is about MEMIT's KL
    in turn             one after another; `first` are the first ten facts after the last one
    memit               all facts: MEMIT in the five lowest of the layers, with targets by gradient
    lora                all facts: the student's context distillation into a LoRA of the same
                        matrices, for as many seconds as `all` took
    fine-tuning         all facts: next-token training of the same matrices, for as many seconds
    document            the first 256 tokens of two articles, as plain text, each alone
    system prompt       two system prompts (prompts.jsonl), each alone

    answer              log-probability of the answer after the prompt, nats
    paraphrases         after the paraphrases, which nothing has seen
    answer_share        share of the gain in context
    neighbours          share of neighbours whose most likely word is unchanged
    kl                  KL from the model before on other text, nats a token, and its error
    seconds             to find the edit, without the moments of general text (`moments_seconds`)

and of a context

    before              KL from the model with the context to the one without it, on what it did not
                        see: the next 128 tokens of the article, answers to eight questions
    closed              share of that KL that is closed
    bias_...            the same with the mean change of each layer's output as a bias
    in_turn...          the same if one is written after another, with all of them in the model
    last_alone          share closed of the last one, when the others were taken out again
    left                the largest share closed when all were taken out: 0

Gradient rows are scaled down until their KL keeps --max_kl, like the update; the time for that does
not count. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import edit_contexts
import npt
from fetch_model import fetched
from npt.adapters.consolidate import Consolidation, applied, apply_update, patched_module
from npt.adapters.converted import adapter_mode, decoder_layers
from npt.base.linear import patch_term
from npt.batch import IGNORE_INDEX, Sample, collate
from npt.cli.consolidate import read_facts
from npt.console import complain, put
from npt.data.continuation import bare_tokens, opening_tokens, prompt_tokens
from npt.errors import NPTError, NumericalError
from npt.evaluation.metrics import final_states
from npt.files import to_json, write_json
from npt.tools.editing.edit_metrics import Baseline, Forgetting
from npt.tools.editing.layerwise import least_squares
from npt.tools.editing.probes import Fact, Probe, answer_probe, subjects
from npt.tools.editing.write import find_update, gathered, general_text, layers_to_patch
from this_machine import code_hash, machine

OWN = Path(__file__).with_name("facts.jsonl")
FACT_ROWS = (
    "before",
    "in context",
    "one",
    "six",
    "all",
    "cautious",
    "in turn",
    "memit",
    "lora",
    "fine-tuning",
)
ROWS = (*FACT_ROWS, "document", "system prompt")
LITTLE = 0.006
REPORT_SAMPLES = 16
LORA_RANK = 16
RATE = {"lora": 1e-3, "fine-tuning": 1e-4, "memit": 0.5}
MEMIT_STEPS = 20
MEMIT_LAYERS = 5
BATCH = 16


class Bench:
    """A model, its facts, and its general text."""

    def __init__(self, arguments: argparse.Namespace):
        self.max_kl, self.seed = arguments.max_kl, arguments.seed
        self.facts = list(read_facts(str(arguments.facts)))
        name = str(arguments.model or fetched())
        self.model, self.tokenizer = npt.load_base(name, quantization="nf4", device="cpu")
        if arguments.adapter:
            npt.load_adapter(self.model, arguments.adapter)
        self.layers = layers_to_patch(self.model, None)
        began = time.perf_counter()
        lines = Path(arguments.text).read_text(encoding="utf-8").splitlines()
        text = [{"text": line.strip()} for line in lines if len(line) > 400]
        random.Random(0).shuffle(text)
        kept, reported = text[: len(text) * 3 // 4], text[len(text) * 3 // 4 :]
        self.general = general_text(self.model, self.tokenizer, kept, self.layers)
        self.moments_seconds = time.perf_counter() - began
        opening, size = opening_tokens(self.tokenizer), 256
        needed = edit_contexts.DOCUMENT_TOKENS + edit_contexts.JUDGED_TOKENS
        self.long_texts = [
            record["text"]
            for record in reported[REPORT_SAMPLES:]
            if len(bare_tokens(self.tokenizer, record["text"])) >= needed
        ]
        self.reported = [
            Sample(str(n), (*opening, *bare_tokens(self.tokenizer, record["text"])[:size]))
            for n, record in enumerate(reported[:REPORT_SAMPLES])
        ]
        self.seconds_of_all = 60.0

    def baseline(self, facts: Sequence[Fact]) -> Baseline:
        """Measure the model as it is now."""
        asked = [(f, f.prompt) for f in facts], [(f, p) for f in facts for p in f.paraphrases]
        answers, paraphrases = (
            [answer_probe(self.tokenizer, fact, prompt, fact.text) for fact, prompt in pairs]
            for pairs in asked
        )
        neighbours = [prompt_tokens(self.tokenizer, text) for f in facts for text in f.neighbours]
        return Baseline(self.model, self.reported, answers, paraphrases, neighbours, self.layers)

    def find(self, facts: Sequence[Fact]) -> tuple[Consolidation, float]:
        """Return an update and the seconds that it took."""
        began = time.perf_counter()
        update = find_update(
            self.model, self.tokenizer, facts, self.general, max_kl=self.max_kl, seed=self.seed
        )
        return update, time.perf_counter() - began

    def edited(self, facts: Sequence[Fact]) -> dict[str, Any]:
        """Write facts at once, measure, and take them out again."""
        baseline = self.baseline(facts)
        update, seconds = self.find(facts)
        with applied(self.model, update):
            figures = figures_of(baseline.against(self.model))
        return {**figures, "penalty": update.record["penalty"], "seconds": seconds / len(facts)}

    def scaled(self, patches: dict[int, tuple[Tensor, Tensor]]) -> Consolidation:
        """Return patches at the largest strength tried that keeps the bound."""
        forgetting, strength = Forgetting(self.model, self.general.bound, self.layers), 1.0
        while True:
            update = Consolidation(
                {index: (strength * outer, inner) for index, (outer, inner) in patches.items()}
            )
            with applied(self.model, update):
                kl = forgetting.upper_kl(self.model, self.max_kl)
            if strength < 1e-3:
                raise NumericalError(f"no strength above {strength:.1g} keeps --max_kl")
            if kl <= self.max_kl:
                return replace(update, record={"strength": strength})
            strength *= min(0.9, math.sqrt(self.max_kl / kl))


def figures_of(retention: Any) -> dict[str, float]:
    """Return the student's figures of a row."""
    recall, forgetting = retention["recall"]["student"], retention["forgetting"]["student"]
    found = {"kl": forgetting["kl"], "kl_se": forgetting["kl_se"]}
    for prefix, name in (("", "answer"), ("paraphrases_", "paraphrases")):
        if f"{prefix}after" in recall:
            before, most = recall[f"{prefix}before"], recall[f"{prefix}in_context"]
            found[name] = recall[f"{prefix}after"]
            found[f"{name}_before"], found[f"{name}_in_context"] = before, most
            found[f"{name}_share"] = recall[f"{prefix}gain"] / (most - before)
    if "neighbours_same" in recall:
        found["neighbours"] = recall["neighbours_same"]
    if "share_through_code" in recall:
        found["share_through_code"] = recall["share_through_code"]
    return found


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}


def before(bench: Bench) -> dict[str, Any]:
    return figures_of(bench.baseline(bench.facts).against(bench.model))


def in_context(bench: Bench) -> dict[str, Any]:
    found = before(bench)
    names = ("answer", "paraphrases")
    return {name: found[f"{name}_in_context"] for name in names if name in found}


def one(bench: Bench) -> dict[str, Any]:
    return mean_of([bench.edited([fact]) for fact in bench.facts[:6]])


def six(bench: Bench) -> dict[str, Any]:
    return bench.edited(bench.facts[:6])


def all_at_once(bench: Bench) -> dict[str, Any]:
    found = bench.edited(bench.facts)
    bench.seconds_of_all = found["seconds"] * len(bench.facts)
    return found


def cautious(bench: Bench) -> dict[str, Any]:
    usual, bench.max_kl = bench.max_kl, LITTLE
    try:
        return {**bench.edited(bench.facts), "max_kl": LITTLE}
    finally:
        bench.max_kl = usual


def in_turn(bench: Bench) -> dict[str, Any]:
    every = bench.baseline(bench.facts)
    first = bench.baseline(bench.facts[:10])
    seconds = 0.0
    shares = {}
    for number, fact in enumerate(bench.facts, 1):
        update, spent = bench.find([fact])
        seconds += spent
        apply_update(bench.model, update)
        if number % 10 == 0 or number == len(bench.facts):
            shares[number] = figures_of(first.against(bench.model))["answer_share"]
            complain(f"in turn: {number} facts, {seconds:.0f} s, first ten {shares[number]:.3f}")
    found = figures_of(every.against(bench.model))
    npt.unconsolidate(bench.model, None)
    of_first = list(shares.values())
    kept = {"first_share": of_first[-1], "first_share_before": of_first[0], "first_shares": shares}
    return {**found, **kept, "seconds": seconds / len(bench.facts)}


@contextmanager
def trainable(bench: Bench, terms: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Within the context, add a term of p to the product of each layer's matrix."""
    layers = decoder_layers(bench.model)

    def add(term: Callable[[Tensor], Tensor], _module: Any, args: Any, output: Tensor) -> Tensor:
        return output + term(args[0].to(torch.float32)).to(output.dtype)

    with ExitStack() as stack:
        stack.enter_context(adapter_mode(bench.model, "student"))
        for index, term in terms.items():
            module = patched_module(layers[index])
            stack.callback(module.register_forward_hook(partial(add, term)).remove)
        yield


def log_p(bench: Bench, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the next token [P, V] where there is a target, and it [P]."""
    batch = collate(samples)
    logits = bench.model.lm_head(final_states(bench.model, batch)).to(torch.float32)
    return torch.log_softmax(logits, dim=-1), batch.labels[:, 1:][
        batch.labels[:, 1:] != IGNORE_INDEX
    ]


def train(
    bench: Bench,
    name: str,
    parameters: Sequence[nn.Parameter],
    loss_of: Callable[[Sequence[Probe]], Tensor],
) -> int:
    """Train for as long as the update of all facts took; return the number of steps."""
    probes = gathered(bench.model, bench.tokenizer, bench.facts, "", 0, bench.seed).probes
    optimizer = torch.optim.Adam(parameters, lr=RATE[name])
    order, steps, began = random.Random(bench.seed), 0, time.perf_counter()
    while time.perf_counter() - began < bench.seconds_of_all:
        loss = loss_of(order.sample(probes, min(BATCH, len(probes))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    return steps


def measured(
    bench: Bench, patches: dict[int, tuple[Tensor, Tensor]], **more: Any
) -> dict[str, Any]:
    """Scale patches to the bound, measure them, and take them out."""
    baseline = bench.baseline(bench.facts)
    update = bench.scaled(patches)
    with applied(bench.model, update):
        found = figures_of(baseline.against(bench.model))
    return {**found, **update.record, **more}


def lora(bench: Bench) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(bench.seed)
    inner, outer = {}, {}
    for index in bench.layers:
        module = patched_module(decoder_layers(bench.model)[index])
        first = torch.randn(LORA_RANK, module.in_features, generator=generator)
        inner[index] = nn.Parameter(first / module.in_features**0.5)
        outer[index] = nn.Parameter(torch.zeros(module.out_features, LORA_RANK))

    def term(index: int, p: Tensor) -> Tensor:
        return p @ inner[index].t() @ outer[index].t()

    def distil(probes: Sequence[Probe]) -> Tensor:
        with torch.no_grad(), adapter_mode(bench.model, "student"):
            taught = log_p(bench, [probe.read() for probe in probes])[0]
        with trainable(bench, terms):
            learned = log_p(bench, [probe.alone() for probe in probes])[0]
        return (taught.exp() * (taught - learned)).sum(dim=-1).mean()

    terms = {index: partial(term, index) for index in bench.layers}
    steps = train(bench, "lora", [*inner.values(), *outer.values()], distil)
    patches = {i: (outer[i].detach(), inner[i].detach()) for i in bench.layers}
    return measured(bench, patches, steps=steps, seconds=bench.seconds_of_all / len(bench.facts))


def fine_tuning(bench: Bench) -> dict[str, Any]:
    changes = {}
    for index in bench.layers:
        module = patched_module(decoder_layers(bench.model)[index])
        changes[index] = nn.Parameter(torch.zeros(module.out_features, module.in_features))

    def term(index: int, p: Tensor) -> Tensor:
        return p @ changes[index].t()

    def next_token(probes: Sequence[Probe]) -> Tensor:
        with trainable(bench, terms):
            found, targets = log_p(bench, [probe.alone() for probe in probes])
        return -found.gather(-1, targets.unsqueeze(-1)).mean()

    terms = {index: partial(term, index) for index in bench.layers}
    steps = train(bench, "fine-tuning", list(changes.values()), next_token)
    patches = {i: (torch.eye(len(change)), change.detach()) for i, change in changes.items()}
    return measured(bench, patches, steps=steps, seconds=bench.seconds_of_all / len(bench.facts))


def memit(bench: Bench) -> dict[str, Any]:
    """MEMIT (Meng et al., 2023): a vector added to the subject's last token, found by gradient so
    that the answers become likely, is spread over layers by least squares.
    """
    layers = bench.layers[:-1][:MEMIT_LAYERS]  # the last one changes no later token
    began = time.perf_counter()
    spans = subjects(bench.model, bench.tokenizer, [fact.prompt for fact in bench.facts])
    rows, wanted = [], []
    for fact, (_, last) in zip(bench.facts, spans, strict=True):
        place = max(0, last - 1) + len(opening_tokens(bench.tokenizer))
        probe = answer_probe(bench.tokenizer, fact, fact.prompt, fact.text)
        rows.append((probe.alone(), place))
        wanted.append(_target(bench, probe.alone(), place, layers[-1]))
    deltas = torch.stack(wanted)
    patches: dict[int, tuple[Tensor, Tensor]] = {}
    done = torch.zeros_like(deltas)
    for number, index in enumerate(layers):
        keys, outputs = _at_places(bench, rows, index, layers[-1], patches)
        if number == 0:
            start = outputs
        done = outputs - start
        missing = (deltas - done) / (len(layers) - number)
        factor = bench.general.factors[index]
        patches[index] = least_squares(keys, missing, factor, 3e3)
    seconds = (time.perf_counter() - began) / len(bench.facts)
    return measured(bench, patches, seconds=seconds)


def _target(bench: Bench, sample: Sample, place: int, index: int) -> Tensor:
    """Return the vector [D] to add to a layer's output at one token."""
    layer = decoder_layers(bench.model)[index]
    delta = nn.Parameter(torch.zeros(bench.model.config.hidden_size))
    optimizer = torch.optim.Adam([delta], lr=RATE["memit"])
    size = 0.0

    def add(_module: Any, _args: Any, output: Tensor) -> Tensor:
        nonlocal size
        size = float(output[0, place].detach().norm())
        moved = output.clone()
        moved[:, place] = moved[:, place] + delta
        return moved

    hook = layer.register_forward_hook(add)
    try:
        for _ in range(MEMIT_STEPS):
            with adapter_mode(bench.model, "student"):
                found, targets = log_p(bench, [sample])
            loss = -found.gather(-1, targets.unsqueeze(-1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():  # the original's bound: 3/4 of the state's size
                delta.mul_(min(1.0, 0.75 * size / float(delta.norm())))
    finally:
        hook.remove()
    return delta.detach()


@torch.no_grad()
def _at_places(
    bench: Bench,
    rows: Sequence[tuple[Sample, int]],
    index: int,
    last: int,
    patches: dict[int, tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return p of one layer and o of the last at the rows' places, [n, F] and [n, D]."""
    seen: dict[str, Tensor] = {}
    layers = decoder_layers(bench.model)
    terms = {i: partial(patch_term, patch) for i, patch in patches.items()}
    with trainable(bench, terms), ExitStack() as stack:
        module = patched_module(layers[index])
        hook = module.register_forward_pre_hook(lambda _, args: seen.update(p=args[0]))
        stack.callback(hook.remove)
        hook = layers[last].register_forward_hook(lambda _, args, output: seen.update(o=output))
        stack.callback(hook.remove)
        final_states(bench.model, collate([sample for sample, _ in rows]))
    number = torch.arange(len(rows))
    places = torch.tensor([place for _, place in rows])
    return seen["p"][number, places].float(), seen["o"][number, places].float()


MAKE: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "before": before,
    "in context": in_context,
    "one": one,
    "six": six,
    "all": all_at_once,
    "cautious": cautious,
    "in turn": in_turn,
    "memit": memit,
    "lora": lora,
    "fine-tuning": fine_tuning,
    "document": edit_contexts.document,
    "system prompt": edit_contexts.system_prompt,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", required=True)
    parser.add_argument("--facts", default=OWN)
    parser.add_argument("--adapter")
    parser.add_argument("--model")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--max_kl", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        rows = measure(arguments)
    except NPTError as error:
        complain(f"edit.py: {error}")
        return getattr(error, "exit_status", 2)
    if arguments.json:
        put(to_json(rows, indent=2))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the rows, and write each to --out at once."""
    bench = Bench(arguments)
    found: dict[str, Any] = {"rows": {}}
    if arguments.out and arguments.out.exists():
        found = json.loads(arguments.out.read_text(encoding="utf-8"))
        bench.seconds_of_all = found["rows"].get("all", {}).get("seconds_of_all", 60.0)
    for name in arguments.rows.split(","):
        row = {"max_kl": bench.max_kl, **MAKE[name](bench)}
        row |= {"facts": len(bench.facts), "code": code_hash()}
        if name == "all":
            row["seconds_of_all"] = bench.seconds_of_all
        found["rows"][name] = row
        found["moments_seconds"] = bench.moments_seconds
        found["machine"] = machine(torch.device("cpu"))
        complain(f"{name}: {json.dumps(row)}")
        if arguments.out:
            write_json(arguments.out, found)
    return found


if __name__ == "__main__":
    sys.exit(main())
