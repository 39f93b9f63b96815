"""Faults for the tracer to find: each planted in the embedded 4-bit model, with the place where it
has to be found.

The truth stands beside the plant and comes from how it is planted, never from what the tracer said:
the tensor and element that are spoilt, and the operation that torch runs on them. Where a product
overflows, the first element that does is computed here in plain fp64.

Shapes: the batch has 2 rows of 16 and 12 valid tokens; the local strategy gathers their N = 28
rows, and stacks the student's in front of the teacher's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F

from faults.bench import Fill, Plant, Setting, Student, module_of
from faults.plants import (
    batch_fault,
    cross_entropy_of_nothing,
    extra_loss,
    id_at,
    label_at,
    output_fault,
    reverse_kl,
    trained_head,
)
from faults.poisons import Poison, frozen, statistic, weight
from npt.base.linear import dense_weight
from npt.data.batch import Batch
from npt.diagnostics.tracer.trace import trace
from npt.diagnostics.tracer.verdict import Verdict

LOCAL = Setting(layers="2,5", windows=1)
END_TO_END = replace(LOCAL, strategy="end_to_end")
WITH_LOGITS = replace(END_TO_END, logit_kl_weight=1.0)
LEFT = replace(LOCAL, padding="left")
PLACE = (0, 0)

Index = tuple[int, ...]


@dataclass(frozen=True)
class Truth:
    """Where a fault has to be found. token: (row, token), None where the tensor is of no token."""

    phase: str
    layer: int | None
    module: str
    operation: str
    index: Index
    cause: str
    token: tuple[int, int] | None = None

    def __str__(self) -> str:
        return _sentence(self.phase, self.operation, self.module, self.index)

    def fits(self, verdict: Verdict) -> bool:
        same = all(
            getattr(verdict, name) == getattr(self, name)
            for name in ("phase", "layer", "module", "operation", "index", "cause")
        )
        return same and (self.token is None or (verdict.row, verdict.token) == self.token)


@dataclass(frozen=True)
class Case:
    """A planted fault.

    plant: for one micro-batch, as in the fault campaign. act: done to the student before. truth:
    fixed, or computed from the clean student and its batch. plain: the model's own forward and its
    loss are traced, not a training step.
    """

    id: str
    name: str
    group: str
    truth: Truth | Callable[[Student, Batch], Truth]
    plant: Plant | None = None
    act: Poison | None = None
    setting: Setting = LOCAL
    plain: bool = False


@dataclass(frozen=True)
class Line:
    """What was found of a case."""

    case: Case
    truth: Truth
    verdict: Verdict | None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.truth.fits(self.verdict)

    @property
    def found(self) -> str:
        v = self.verdict
        return self.error or (
            "nothing" if v is None else _sentence(v.phase, v.operation, v.module, v.index)
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.case.id,
            "name": self.case.name,
            "group": self.case.group,
            "planted": str(self.truth),
            "found": self.found,
            "cause": self.truth.cause,
            "cause_found": None if self.verdict is None else self.verdict.cause,
            "passed": self.passed,
        }


def _sentence(phase: str, operation: str, module: str, index: Index) -> str:
    return f"{phase}: {operation or 'no operation'} in {module or 'no module'} at {list(index)}"


def _short(sentence: str) -> str:
    """For a table: without the words that every line has."""
    for word, short in ((" in model.", ", "), (" in ", ", "), (" at [", " ["), ("layers.", "")):
        sentence = sentence.replace(word, short, 1)
    return sentence


# --- plants that only a trace asks for
# -------------------------------------------------------------------------------


def changed(module: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """`module` gives what `change` makes of its output."""
    return output_fault(module, lambda output, _batch: change(output))


def together(*plants: Plant) -> Plant:
    """Several faults in one micro-batch; the first one's batch and fill are used."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        with ExitStack() as stack:
            results = [stack.enter_context(one(student, batch)) for one in plants]
            yield results[0]

    return plant


def eager(*plants: Plant) -> Plant:
    """Attention written out in torch's own operations."""

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        before = student.model.config._attn_implementation
        student.model.config._attn_implementation = "eager"
        try:
            with (
                together(*plants)(student, batch) if plants else _nothing(student, batch)
            ) as result:
                yield result
        finally:
            student.model.config._attn_implementation = before

    return plant


def mask_row(layer: int, row: int, query: int, form: str) -> Plant:
    """A valid token's row of one layer's attention mask leaves it nothing to attend to, in one of
    the forms of a mask.
    """

    def hook(
        _module: Any, inputs: tuple[Any, ...], arguments: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = arguments["attention_mask"].clone()
        if form != "bool" and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        mask[row, :, query] = {
            "bool": False,
            "-inf": -math.inf,
            "finfo.min": torch.finfo(torch.float32).min,
        }[form]
        return inputs, {**arguments, "attention_mask": mask}

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        handle = module_of(student, f"model.layers.{layer}.self_attn").register_forward_pre_hook(
            hook, with_kwargs=True
        )
        try:
            yield batch, None
        finally:
            handle.remove()

    return plant


def input_changed(
    module: str, change: Callable[[Tensor], Tensor], compute: torch.dtype | None = None
) -> Plant:
    """`module` is given what `change` makes of its input, and computes in another dtype where
    asked.
    """

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        layer: Any = module_of(student, module)
        handle = layer.register_forward_pre_hook(
            lambda _module, inputs: (change(inputs[0]), *inputs[1:])
        )
        before = getattr(layer, "compute_dtype", None)
        if compute is not None:
            layer.compute_dtype = compute
        try:
            yield batch, None
        finally:
            handle.remove()
            if compute is not None:
                layer.compute_dtype = before

    return plant


def gradient_written(name: str, index: Index, value: float) -> Plant:
    """A hook that writes into the gradient of a parameter."""

    def write(gradient: Tensor) -> Tensor:
        return gradient.index_put(tuple(torch.tensor([i]) for i in index), torch.tensor(value))

    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        handle = student.parameters[name].register_hook(write)
        try:
            yield batch, None
        finally:
            handle.remove()

    return plant


def recomputed(module: str, index: Index) -> Plant:
    """NaN in the output of `module` where it is computed again for backward, and nowhere else."""

    def change(output: Tensor) -> Tensor:
        again = torch._C._current_autograd_node() is not None
        return output.masked_fill(_one_hot(output, index) & again, math.nan)

    return changed(module, change)


def once(module: str) -> Plant:
    """NaN out of `module` at its first call and at no other: what a bit flip in a cache does."""
    calls = 0

    def change(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output * math.nan if calls == 1 else output

    return changed(module, change)


def zeroed_token(row: int, token: int, plant: Plant) -> Plant:
    """The embedding of one token is zero, beside another plant."""

    def change(output: Tensor) -> Tensor:
        output = output.clone()
        output[row, token] = 0.0
        return output

    return together(plant, changed("model.embed_tokens", change))


@contextmanager
def _nothing(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
    yield batch, None


@contextmanager
def _epsilon(student: Student, name: str, value: float) -> Iterator[None]:
    norm: Any = module_of(student, name)
    before, norm.variance_epsilon = norm.variance_epsilon, value
    try:
        yield
    finally:
        norm.variance_epsilon = before


def epsilon(name: str, value: float) -> Plant:
    @contextmanager
    def plant(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        with _epsilon(student, name, value):
            yield batch, None

    return plant


class _Amplify(torch.autograd.Function):
    """The identity, whose backward multiplies one element of the gradient by 1e38, twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: int, column: int) -> Tensor:
        ctx.at = (row, column)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        factor = torch.ones_like(gradients[0])
        factor[ctx.at] = 1e38
        return gradients[0] * factor * factor, None, None


def _one_hot(like: Tensor, index: Index) -> Tensor:
    """Boolean, True at one element."""
    at = torch.zeros(like.shape, dtype=torch.bool)
    at[index] = True
    return at


def _put(x: Tensor, index: Index, value: float) -> Tensor:
    """`x` with one element replaced, in one operation that is differentiable and writes nothing
    bad.
    """
    return torch.where(_one_hot(x, index), value, x)


def applied(
    function: Callable[[Tensor], Tensor], index: Index, value: float
) -> Callable[[Tensor], Tensor]:
    """`function` of numbers that it bears, and of `value` at one element."""
    return lambda x: function(_put(x.abs().clamp(0.1, 1.0), index, value))


def _unit(x: Tensor, row: int, token: int) -> Tensor:
    """[B, T, D] states as unit vectors, that of one token from a vector of zeros."""
    at = torch.ones(x.shape)
    at[row, token] = 0.0
    return (x * at) / (x * at).norm(dim=-1, keepdim=True)


def _hidden_log(x: Tensor, index: Index) -> Tensor:
    """x log x with its 0 log 0 hidden by a `where` behind it, as it is often written."""
    x = x * ~_one_hot(x, index)
    return torch.where(x == 0, 0.0, x * x.abs().log())


# --- truths that have to be computed
# ----------------------------------------------------------------------------------


def _overflow_of(
    module: str, what: str, at: Index, value: float
) -> Callable[[Student, Batch], Truth]:
    """The first element of the product of `module`'s input and its weight, with one statistic
    changed, that fp32 cannot hold.
    """

    def truth(student: Student, batch: Batch) -> Truth:
        layer, seen = module_of(student, module), []
        handle = layer.register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0].detach().double())
        )
        student.fill(batch)
        handle.remove()
        clean = dense_weight(layer)
        statistic(f"{module}: {what}", at, value)(student)
        product = F.linear(seen[0], dense_weight(layer).double())
        assert not torch.equal(clean, dense_weight(layer))
        (first,) = (product.abs() > torch.finfo(torch.float32).max).nonzero()[:1].tolist()
        return Truth(
            "forward", 1, module, "gemm_4bit", tuple(first), "corrupt absmax", (first[0], first[1])
        )

    return truth


def _first_underflow(student: Student, batch: Batch) -> Truth:
    """The first probability of the student that a low temperature takes to 0."""
    with torch.no_grad():
        logits = student.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    (first,) = (torch.softmax(logits / 0.05, dim=-1) == 0).nonzero()[:1].tolist()
    return Truth("forward", None, "", "log", tuple(first), "masked gradient", (first[0], first[1]))


def _embedded_token(row: int, token: int, column: int) -> Callable[[Student, Batch], Truth]:
    return lambda _student, batch: Truth(
        "state",
        None,
        "model.embed_tokens",
        "embedding",
        (int(batch.input_ids[row, token]), column),
        "corrupt weight",
    )


def _token_weight(row: int, token: int, column: int, value: float) -> Poison:
    def act(student: Student) -> None:
        frozen(
            "model.embed_tokens.weight",
            (int(student.setting.batch(PLACE).input_ids[row, token]), column),
            value,
        )(student)

    return act


# --- the cases
# ---------------------------------------------------------------------------------------------------------


def _state() -> Iterator[Case]:
    yield Case(
        "adapter-nan",
        "NaN in A of layer 5",
        "weight",
        Truth("state", 5, "model.layers.5.npt", "mm", (1, 7), "corrupt weight", (0, 0)),
        act=weight("model.layers.5.npt.A", (1, 7), math.nan),
    )
    yield Case(
        "adapter-inf",
        "Inf in M.gate of layer 2, student's stream",
        "weight",
        Truth("state", 2, "model.layers.2.npt.M", "mm", (3, 2), "corrupt weight", (0, 0)),
        act=weight("model.layers.2.npt.M.gate", (3, 2), math.inf),
        setting=END_TO_END,
    )
    yield Case(
        "norm-weight",
        "NaN in an RMSNorm's weight",
        "weight",
        Truth(
            "state",
            3,
            "model.layers.3.post_attention_layernorm",
            "mul",
            (9,),
            "corrupt weight",
            (0, 0),
        ),
        act=frozen("model.layers.3.post_attention_layernorm.weight", (9,), math.nan),
    )
    yield Case(
        "embedding-row",
        "Inf in the embedding of one token",
        "weight",
        _embedded_token(0, 4, 11),
        act=_token_weight(0, 4, 11, math.inf),
    )
    yield Case(
        "head-weight",
        "NaN in lm_head, the model's own loss",
        "weight",
        Truth("state", None, "lm_head", "_to_copy", (5, 3), "corrupt weight"),
        act=frozen("lm_head.weight", (5, 3), math.nan),
        plain=True,
    )
    yield Case(
        "absmax-nan",
        "NaN in a 4-bit weight's second-level absmax",
        "absmax",
        Truth(
            "state", 3, "model.layers.3.mlp.up_proj", "gemm_4bit", (1,), "corrupt absmax", (0, 0)
        ),
        act=statistic("model.layers.3.mlp.up_proj: state2.absmax", (1,), math.nan),
    )
    yield Case(
        "offset-inf",
        "Inf in a 4-bit weight's offset",
        "absmax",
        Truth(
            "state", 5, "model.layers.5.mlp.down_proj", "gemm_4bit", (), "corrupt absmax", (0, 0)
        ),
        act=statistic("model.layers.5.mlp.down_proj: offset", (), math.inf),
    )
    yield Case(
        "absmax-huge",
        "a finite 1e38 in a 4-bit weight's absmax",
        "absmax",
        _overflow_of("model.layers.1.self_attn.q_proj", "state2.absmax", (0,), 1e38),
        act=statistic("model.layers.1.self_attn.q_proj: state2.absmax", (0,), 1e38),
    )


def _forward() -> Iterator[Case]:
    module = "model.layers.5.mlp.down_proj"
    yield Case(
        "cast-fp16",
        "1e5 cast to fp16 inside a 4-bit layer",
        "cast",
        Truth("forward", 5, module, "_to_copy", (3, 17), "cast overflow", (0, 3)),
        plant=input_changed(module, lambda x: _put(x, (3, 17), 1e5), torch.float16),
    )
    yield Case(
        "product-fp16",
        "300 * 300 in fp16",
        "cast",
        Truth(
            "forward",
            5,
            "model.layers.5.mlp.act_fn",
            "mul",
            (3, 17),
            "low-precision overflow",
            (0, 3),
        ),
        plant=changed(
            "model.layers.5.mlp.act_fn",
            lambda x: (_put(x, (3, 17), 300.0).half() * _put(x, (3, 17), 300.0).half()).float(),
        ),
    )
    for form in ("bool", "finfo.min"):
        yield Case(
            f"mask-{form.split('.')[0]}",
            f"a valid token's mask row all {'False' if form == 'bool' else form}: finite, and"
            " wrong",
            "mask",
            Truth(
                "data",
                1,
                "model.layers.1.self_attn",
                "attention_mask",
                (0, 5),
                "fully masked row",
                (0, 5),
            ),
            plant=mask_row(1, 0, 5, form),
        )
    yield Case(
        "mask-inf",
        "a valid token's mask row all -Inf, attention written out",
        "mask",
        Truth(
            "forward",
            1,
            "model.layers.1.self_attn",
            "_softmax",
            (0, 0, 5, 0),
            "fully masked row",
            (0, 5),
        ),
        plant=eager(mask_row(1, 0, 5, "-inf")),
    )
    yield Case(
        "norm-epsilon",
        "RMSNorm without epsilon on a token whose state is 0",
        "division",
        Truth(
            "forward",
            0,
            "model.layers.0.input_layernorm",
            "rsqrt",
            (0, 4, 0),
            "vanishing norm",
            (0, 4),
        ),
        plant=zeroed_token(0, 4, epsilon("model.layers.0.input_layernorm", 0.0)),
    )
    yield Case(
        "unit-vector",
        "a vector divided by its norm of 0",
        "division",
        Truth(
            "forward",
            3,
            "model.layers.3.self_attn.o_proj",
            "div",
            (0, 6, 0),
            "vanishing norm",
            (0, 6),
        ),
        plant=changed("model.layers.3.self_attn.o_proj", lambda x: _unit(x, 0, 6)),
    )
    yield Case(
        "mean-of-none",
        "a sum over no token divided by their number",
        "division",
        Truth("forward", None, "", "div", (), "division by zero"),
        plant=extra_loss(
            lambda student, _: (
                student.parameters["model.layers.2.npt.A"].sum() * 0 / torch.zeros(())
            )
        ),
    )
    yield Case(
        "no-labels",
        "cross-entropy with every label ignored",
        "data",
        Truth("forward", None, "", "nll_loss_forward", (), "no valid label"),
        plant=extra_loss(cross_entropy_of_nothing("mean")),
    )
    yield Case(
        "residual-amplified",
        "the residual stream times 1e25 behind layer 4",
        "explosion",
        Truth("forward", 5, "model.layers.5", "pow", (0, 0), "exploding product", (0, 0)),
        plant=changed("model.layers.4", lambda x: x * 1e25),
    )
    yield Case(
        "attention-logits",
        "queries and keys times 1e25: the attention logits overflow",
        "explosion",
        Truth("forward", 1, "model.layers.1.self_attn", "bmm", (0, 0, 0), "exploding product"),
        plant=eager(
            changed("model.layers.1.self_attn.q_proj", lambda x: x.abs() * 1e25),
            changed("model.layers.1.self_attn.k_proj", lambda x: x.abs() * 1e25),
        ),
    )
    yield Case(
        "modulation-huge",
        "residual and modulation multiplied beyond fp32",
        "explosion",
        Truth("forward", 2, "model.layers.2.mlp", "mul", (0, 7), "exploding product", (0, 0)),
        plant=together(
            changed("model.layers.2.mlp.act_fn", lambda x: _put(x, (0, 7), 1e30)),
            changed("model.layers.2.mlp.up_proj", lambda x: _put(x, (0, 7), 1e30)),
        ),
    )
    act = "model.layers.5.mlp.act_fn"
    for id, name, value, function, cause in (
        ("exp", "exp(100)", 100.0, torch.exp, "exponential overflow"),
        ("log", "the logarithm of 0", 0.0, torch.log, "invalid argument"),
        ("sqrt", "the root of a negative number", -1.0, torch.sqrt, "invalid argument"),
    ):
        yield Case(
            f"forward-{id}",
            name,
            "forward",
            Truth("forward", 5, act, id, (2, 9), cause, (0, 2)),
            plant=changed(act, applied(function, (2, 9), value)),
        )
    yield Case(
        "written",
        "a hook that writes NaN into an activation",
        "forward",
        Truth("forward", 5, act, "masked_fill", (2, 9), "written constant", (0, 2)),
        plant=changed(act, lambda x: x.masked_fill(_one_hot(x, (2, 9)), math.nan)),
    )
    yield Case(
        "decoy",
        "a NaN that a where hides, in front of the one that counts",
        "forward",
        Truth("forward", 5, act, "log", (2, 9), "invalid argument", (0, 2)),
        plant=together(
            changed(
                "model.layers.1.mlp.act_fn", lambda x: torch.where(x == x, x, (x - x) / (x - x))
            ),
            changed(act, applied(torch.log, (2, 9), 0.0)),
        ),
    )
    yield Case(
        "left-padding",
        "the root of a negative number, padding on the left",
        "forward",
        # Row 1 has 4 padded positions in front, so the 17th gathered row, index 16, is its token 4.
        Truth("forward", 5, act, "sqrt", (16, 9), "invalid argument", (1, 4)),
        plant=changed(act, applied(torch.sqrt, (16, 9), -1.0)),
        setting=LEFT,
    )


def _backward() -> Iterator[Case]:
    act = "model.layers.5.mlp.act_fn"
    yield Case(
        "slope-sqrt",
        "the derivative of a root at 0",
        "backward",
        Truth("backward", 5, act, "div in SqrtBackward0", (4, 3), "infinite slope", (0, 4)),
        plant=changed(
            act, lambda x: x + torch.sqrt(torch.where(_one_hot(x, (4, 3)), x - x.detach(), 1.0))
        ),
    )
    yield Case(
        "hidden-log",
        "x log x at 0, hidden by a where behind it",
        "backward",
        Truth("forward", 5, act, "log", (4, 3), "masked gradient", (0, 4)),
        plant=changed(act, lambda x: x + _hidden_log(x, (4, 3))),
    )
    yield Case(
        "gradient-hook",
        "a hook that writes NaN into a gradient",
        "backward",
        Truth("backward", 5, "model.layers.5.npt", "index_put", (2, 5), "written constant"),
        plant=gradient_written("model.layers.5.npt.A", (2, 5), math.nan),
    )
    yield Case(
        "own-backward",
        "a custom function whose backward amplifies beyond fp32",
        "backward",
        Truth("backward", 5, act, "mul", (4, 3), "exploding gradient", (0, 4)),
        plant=changed(act, lambda x: _Amplify.apply(x, 4, 3)),
    )
    yield Case(
        "reverse-kl",
        "reverse KL at T = 0.05: finite loss, NaN gradient",
        "backward",
        _first_underflow,
        plant=extra_loss(reverse_kl),
    )
    yield Case(
        "recomputation",
        "NaN in the recomputed logits only",
        "backward",
        Truth("recomputation", None, "lm_head", "masked_fill", (3, 5), "written constant", (0, 3)),
        plant=trained_head(recomputed("lm_head", (3, 5))),
        setting=WITH_LOGITS,
    )


def _data() -> Iterator[Case]:
    yield Case(
        "token-id",
        "a token id outside the vocabulary",
        "data",
        Truth("data", None, "", "embedding", (1, 3), "token id", (1, 3)),
        plant=batch_fault(id_at(1, 3, 9999)),
    )
    yield Case(
        "label",
        "a label outside the vocabulary",
        "data",
        Truth("data", None, "", "cross_entropy", (0, 2), "token id", (0, 2)),
        plant=batch_fault(label_at(0, 2, -7)),
        plain=True,
    )
    yield Case(
        "transient",
        "NaN at the first call only",
        "transient",
        Truth("forward", None, "", "", (), "not repeatable"),
        plant=once("model.layers.3"),
    )


def all_cases() -> list[Case]:
    """Every planted fault. Ids are unique."""
    return [*_state(), *_forward(), *_backward(), *_data()]


def clean_runs() -> list[Setting]:
    """Settings of which the clean model must give no verdict."""
    return [LOCAL, END_TO_END, WITH_LOGITS, LEFT, replace(LEFT, strategy="end_to_end")]


def find_fault(case: Case) -> Line:
    """Plant a case in a fresh student and trace it."""
    student = Student(case.setting)
    batch = case.setting.batch(PLACE)
    truth = (
        case.truth if isinstance(case.truth, Truth) else case.truth(Student(case.setting), batch)
    )
    if case.act is not None:
        case.act(student)
    plant = case.plant if case.plant is not None else _nothing
    try:
        with plant(student, batch) as (used, fill):
            return Line(case, truth, _trace(student, used, fill, case.plain))
    except Exception as error:  # a tracer that breaks has not found it; the campaign goes on
        return Line(case, truth, None, f"{type(error).__name__}: {error}")


def false_alarms() -> int:
    """Verdicts on the clean model, each of which is one too many."""
    count = 0
    for setting in clean_runs():
        student = Student(setting)
        batch = setting.batch(PLACE)
        for plant in (_nothing, eager()):
            with plant(student, batch):
                count += sum(
                    _trace(student, batch, None, plain) is not None for plain in (False, True)
                )
    return count


def _trace(student: Student, batch: Batch, fill: Fill | None, plain: bool) -> Verdict | None:
    if plain:
        return trace(student.model, batch)
    return trace(
        student.model, batch, run=fill if fill is not None else lambda: student.fill(batch)
    )


def summary(lines: list[Line], alarms: int) -> dict[str, Any]:
    """The demonstration as JSON."""
    return {
        "cases": [line.as_dict() for line in lines],
        "passed": sum(line.passed for line in lines),
        "total": len(lines),
        "false_alarms": alarms,
    }


def print_lines(console: Console, lines: list[Line], alarms: int) -> None:
    """The table of what was planted against what was found."""
    table = Table(title="planted faults and what the tracer found")
    for heading in ("case", "planted", "found", "cause found"):
        table.add_column(heading, overflow="fold")
    for line in lines:
        cause = "" if line.verdict is None else line.verdict.cause
        style = "green" if line.passed else "red"
        table.add_row(
            line.case.id, _short(str(line.truth)), Text(_short(line.found), style=style), cause
        )
    console.print(table)
    console.print("phase: operation, module (its layer's number first) [first bad index]")
    passed = sum(line.passed for line in lines)
    console.print(
        f"found {passed} of {len(lines)} exactly, {alarms} false alarms on the clean model"
    )
