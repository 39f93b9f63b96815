"""`trace` on any module: the first fault exactly, no false alarm, and everything as it was
afterwards.
"""

import ctypes
import dataclasses
import math
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MptConfig,
    MptForCausalLM,
)

import npt
from npt.errors import ConfigError
from npt.tracer.verdict import Verdict

NAN, INF = math.nan, math.inf
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
Function = Callable[[Tensor], Tensor]


class Step(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Function = lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def net(function: Function) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Step(function), nn.Linear(4, 4))


def traced(model: nn.Module, x: Tensor = X, **arguments: Any) -> Verdict | None:
    return npt.trace(model, x, run=lambda: model(x).square().sum(), **arguments)


def fault(model: nn.Module, x: Tensor = X, **arguments: Any) -> Verdict:
    verdict = traced(model, x, **arguments)
    assert verdict is not None
    return verdict


def check(verdict: Verdict | None, **expected: Any) -> None:
    assert verdict is not None
    assert {name: getattr(verdict, name) for name in expected} == expected


def log_of_zero(x: Tensor) -> Tensor:
    return (x - x).log()


def root_of_zero(x: Tensor) -> Tensor:
    return x + (x * 0).sqrt()


def test_a_list_is_given_whole_to_a_model_that_takes_one() -> None:
    """And as its arguments, as from a data loader, to another."""

    class OfSamples(Step):
        def forward(self, samples: list[Tensor]) -> Tensor:
            return torch.stack([self.first(sample).mean() for sample in samples]).mean()

    class OfArguments(Step):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.first(x) - y).square().mean()

    for model in (OfSamples(), OfArguments()):
        assert npt.trace(model, [X, X]) is None
        check(
            npt.trace(model, [X, X * NAN]), cause="corrupt input", tensor="input 1 [3, 4] float32"
        )


# --- everything is as it was


class Everything(nn.Module):
    """Batch statistics, a buffer that is replaced, dropout, and random numbers of Python and
    numpy.
    """

    def __init__(self, function: Function):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.embedding = nn.Embedding(3, 4)
        self.register_buffer("average", torch.zeros(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x) + self.embedding(torch.tensor([0, 1, 2])) * random.random() * float(
            numpy.random.rand()
        )
        self.average = 0.9 * self.average + x.detach().mean(0)
        return self.function(x)


def state(model: nn.Module) -> list[Any]:
    """All that a trace might leave a mark in, as bytes."""
    tensors = [*model.parameters(), *model.buffers()]
    hooks = (
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "hooks" in name and isinstance(hooks, dict)
    )
    return [
        [(id(t), t.requires_grad, t.detach().numpy().tobytes()) for t in tensors],
        [(id(p.grad), p.grad is not None and p.grad.tolist()) for p in model.parameters()],
        [module.training for module in model.modules()],
        list(hooks),
        (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
    ]


@pytest.mark.parametrize(
    "function",
    [lambda x: x, log_of_zero, root_of_zero, lambda x: x * 1e30 * 1e30],
    ids=["clean", "forward", "backward", "growth"],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_trace_leaves_everything_as_it_was(function, training) -> None:
    model = Everything(function).train(training)
    model.net[1].weight.requires_grad_(False)
    model.net[0].weight.grad = torch.full((4, 4), 7.0)
    before = state(model)
    traced(model)
    assert state(model) == before


@pytest.mark.parametrize("at", range(1, 5))
def test_a_pass_that_raises_leaves_everything_as_it_was(at) -> None:
    calls = 0

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise ZeroDivisionError
        return (x * 1e30).square()

    model = Everything(function)
    before = state(model)
    with pytest.raises(ZeroDivisionError):
        traced(model)
    assert state(model) == before


def test_every_pass_sees_the_same_random_numbers() -> None:
    seen = []
    model = net(
        lambda x: (
            seen.append((torch.rand(1).item(), random.random(), numpy.random.rand()))
            or (x * 1e30).square()
        )
    )
    assert fault(model).grew
    assert len(seen) == 4 and len(set(seen)) == 1


def test_an_inputs_gradient_is_kept_and_a_bad_one_found() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    x.grad = kept = torch.ones(2, 4)
    verdict = npt.trace(nn.Module(), x, run=lambda: x.sqrt().sum())
    check(verdict, operation="div in SqrtBackward0", reached="gradient of input")
    assert x.grad is kept and torch.equal(kept, torch.ones(2, 4))


def stepping() -> Tensor:
    model, loss = STEPPED, STEPPED(X).sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    return loss


STEPPED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": stepping}, "run wrote to weight"),
        ({"run": lambda: None}, "run returned a NoneType and made no grad"),
        *(({"batch": X, "limit": limit}, "limit is") for limit in (0.0, -1.0, NAN)),
    ],
)
def test_what_cannot_be_traced_is_refused(arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        npt.trace(STEPPED, **arguments)


# --- what the pass is, and what it is run in

Named = namedtuple("Named", "value other")


@dataclasses.dataclass
class Output:
    value: Tensor
    loss: Tensor | None = None


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "tensor": (lambda x: x, "output"),
    "tuple": (lambda x: (X, (x, 3)), "output 1.0"),
    "mapping": (lambda x: {"a": X, "b": {"c": x}}, "output b.c"),
    "named tuple": (lambda x: Named(None, x), "output 1"),
    "dataclass": (lambda x: Output(x), "output value"),
    "loss": (lambda x: x.sum(), "loss"),
    "loss in a mapping": (lambda x: {"loss": x.sum(), "logits": x}, "loss"),
    "loss in an object": (lambda x: Output(X, x.sum()), "loss"),
    "loss of one element": (lambda x: x.sum().view(1, 1), "loss"),
    "sparse": (lambda x: {"s": x.to_sparse()}, "output s"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_whatever_the_pass_gives_is_judged(kind) -> None:
    wrap, reached = OUTPUTS[kind]
    model = net(log_of_zero)
    verdict = npt.trace(model, run=lambda: wrap(model(X)))
    check(verdict, operation="log", module="1", reached=reached)
    clean = net(lambda x: x)
    assert npt.trace(clean, run=lambda: wrap(clean(X))) is None


@pytest.mark.parametrize(
    "batch", [X, (X,), [X], {"x": X}], ids=["tensor", "tuple", "list", "mapping"]
)
def test_a_batch_is_given_to_the_model_in_its_own_form(batch) -> None:
    bad = X.clone()
    bad[1, 2] = NAN
    assert npt.trace(Step(), batch) is None
    spoilt = {Tensor: bad, tuple: (bad,), list: [bad], dict: {"x": bad}}[type(batch)]
    verdict = npt.trace(Step(), spoilt)
    check(verdict, cause="corrupt input", phase="data", index=(1, 2))
    assert verdict.module == "first" and verdict.source.endswith("in Step.forward: self.first(x)")


def test_a_run_that_runs_backward_itself_is_not_run_backward_again() -> None:
    model = net(lambda x: x)
    assert npt.trace(model, run=lambda: (loss := model(X).sum(), loss.backward())[0]) is None
    model = net(root_of_zero)
    verdict = npt.trace(model, run=lambda: model(X).square().sum().backward())
    check(verdict, operation="div in SqrtBackward0")


@pytest.mark.parametrize(
    "within",
    [
        torch.no_grad,
        torch.inference_mode,
        torch.autograd.detect_anomaly,
        lambda: FlopCounterMode(display=False),
    ],
    ids=["no_grad", "inference_mode", "detect_anomaly", "FlopCounterMode"],
)
@pytest.mark.filterwarnings("ignore:Anomaly")
def test_a_trace_works_whatever_mode_it_is_called_in(within) -> None:
    backward, forward = net(root_of_zero), net(log_of_zero)
    clean = nn.Sequential(net(lambda x: x), Sum())
    with within():
        assert fault(backward).operation == "div in SqrtBackward0"
        assert fault(forward).operation == "log"
        assert traced(clean) is None
        made_inside = X + 0
        assert npt.trace(clean, made_inside) is None


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_a_weight_too_large_for_autocast_is_named_with_a_cached_cast() -> None:
    model = net(lambda x: x)
    with torch.no_grad():
        model[1].last.weight[1, 2] = 1e6
    with torch.autocast("cpu", dtype=torch.float16):
        model(X)
        verdict = npt.trace(model, run=lambda: model(X).float().sum())
    assert verdict is not None
    check(verdict, cause="cast overflow", module="1.last", index=(1, 2))
    assert verdict.operands[0].name == "1.last.weight"


@pytest.mark.parametrize(("backend", "whole"), [("eager", False), ("aot_eager", True)])
def test_a_compiled_module_is_traced_as_if_it_were_not(backend, whole) -> None:
    for function, operation in (
        (log_of_zero, "log"),
        (root_of_zero, "div in SqrtBackward0"),
        (torch.sin, None),
    ):
        torch._dynamo.reset()
        model = net(function)
        model[1] = torch.compile(model[1], backend=backend, fullgraph=whole)
        verdict = traced(model)
        assert (verdict is None) == (operation is None)
        assert verdict is None or (verdict.operation, verdict.module) == (operation, "1")


def test_names_are_those_of_the_model_before_it_was_compiled() -> None:
    model = net(torch.sin)
    model[1] = torch.compile(model[1], backend="eager")
    compiled: Any = torch.compile(model, backend="eager")
    with torch.no_grad():
        model[1].last.weight[1, 2] = NAN
    check(fault(compiled), module="1.last", tensor="1.last.weight [4, 4] float32")
    with torch.no_grad():
        model[1].last.weight[1, 2] = 0
    model[1].last.weight.register_hook(lambda gradient: gradient * INF)
    assert fault(compiled).reached == "gradient of 1.last.weight"
    with npt.trace.watch(compiled) as watched:
        compiled(X).square().sum().backward()
    assert watched.verdict is not None
    assert watched.verdict.reached == "gradient of 1.last.weight"


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_traced_too() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with torch.no_grad():
        dict(model.named_parameters())["0.bias"][2] = INF
    verdict = npt.trace(model, run=lambda: model(X).sum())
    check(verdict, tensor="0.bias [4] float32", index=(2,))


def test_what_only_the_first_pass_shows_is_not_repeatable() -> None:
    for bad in (1, 2):
        calls = 0

        def function(x: Tensor, bad: int = bad) -> Tensor:
            nonlocal calls
            calls += 1
            return x * NAN if calls <= bad else x

        verdict = fault(net(function))
        assert verdict.cause == "not repeatable"
        # Seen under the ledger once, it has a place; seen before only, it has none.
        assert (verdict.operation, verdict.module) == (("", ""), ("mul", "1"))[bad - 1]


# --- no false alarm

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
IDS = torch.randint(3, 64, (3, 8), generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1] * n + [0] * (8 - n) for n in (8, 5, 3)])
PADDING = {"none": None, "right": RIGHT, "left": RIGHT.flip(1)}


def llama(
    attention: str = "sdpa", dtype: torch.dtype = torch.float32, checkpointing: bool | None = None
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TINY, attn_implementation=attention)).to(dtype).train()
    if checkpointing is not None:
        # transformers 5.17
        kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": checkpointing})
    return model


def padded(side: str) -> dict[str, Tensor]:
    return (
        {"input_ids": IDS}
        if PADDING[side] is None
        else {"input_ids": IDS, "attention_mask": PADDING[side]}
    )


@pytest.mark.parametrize(
    ("attention", "dtype", "checkpointing"),
    [
        ("eager", torch.float16, None),
        ("eager", torch.float32, True),
        ("eager", torch.bfloat16, False),
        ("sdpa", torch.float32, None),
        ("sdpa", torch.bfloat16, True),
        ("sdpa", torch.float16, False),
    ],
    ids=str,
)
def test_a_sound_llama_gives_no_alarm(attention, dtype, checkpointing) -> None:
    model = llama(attention, dtype, checkpointing)
    batch = padded("left")
    assert npt.trace(model, batch) is None
    assert npt.trace(model, padded("right"), limit=1e6) is None
    assert npt.trace(model, run=lambda: model(IDS, labels=IDS)) is None
    assert npt.trace(model, {"input_ids": IDS}, run=lambda: model(**batch, labels=IDS)) is None


LOWEST = torch.finfo(torch.float32).min
KEEP = torch.ones(3, 3, dtype=torch.bool).tril()
HIDE = (~KEEP).float()
CAUSAL = torch.full((3, 3), -INF).triu(1)
MASKS: dict[str, Function] = {
    "from before": lambda scores: scores + CAUSAL,
    "masked_fill": lambda scores: scores.masked_fill(~KEEP, -INF),
    "where": lambda scores: torch.where(KEEP, scores, -INF),
    "triu": lambda scores: scores + torch.full((3, 3), -INF).triu(1),
    "finfo": lambda scores: scores + HIDE * LOWEST,
    "finfo twice": lambda scores: scores + 2 * HIDE * LOWEST,
    "half": lambda scores: (scores + HIDE * LOWEST).half().float(),
    "logarithm": lambda scores: scores + KEEP.float().log(),
    "large": lambda scores: scores + HIDE * -1e9,
    "a constant": lambda scores: torch.where(KEEP, scores, scores + torch.tensor(-INF)),
    "assignment": lambda scores: scores.index_put((*HIDE.nonzero().T,), torch.tensor(-INF)),
    "slice": lambda scores: torch.cat([CAUSAL[1:2], scores.masked_fill(~KEEP, -INF)])[1:],
    "ten thousand": lambda scores: scores.masked_fill(~KEEP, -1e4),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_no_fault_and_a_fault_beside_it_is_named(mask) -> None:
    def attention(x: Tensor) -> Tensor:
        masked = MASKS[mask](x @ x.mT)
        return torch.softmax(masked, -1) @ x + torch.logsumexp(masked, -1, keepdim=True)

    model = net(attention)
    assert traced(model) is None
    if mask != "logarithm":  # log of 0 is beyond every limit
        assert traced(model, limit=1e3) is None
    check(fault(nn.Sequential(model, net(log_of_zero))), operation="log", module="1.1")


def plain_models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    image, words = torch.randn(2, 3, 8, 8), torch.tensor([[1, 2, 0], [3, 0, 0]])
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return {
        "convolutions": (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            (image,),
        ),
        "embedding": (
            nn.Sequential(nn.Embedding(5, 4, padding_idx=0, sparse=True), nn.LayerNorm(4)),
            (words,),
        ),
        "recurrent": (nn.LSTM(4, 4, 2, bidirectional=True), (X[None],)),
        "transformer": (
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            (X[None], None, torch.tensor([[False, False, True]])),
        ),
        "attention": (attention, (X[None], X[None], X[None], torch.tensor([[False, True, True]]))),
        "doubles": (nn.Linear(4, 4).double(), (X.double(),)),
    }


@pytest.mark.parametrize("name", plain_models())
def test_sound_modules_of_torch_give_no_alarm(name) -> None:
    model, arguments = plain_models()[name]

    def run() -> Tensor:
        output = model(*arguments)
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    for training in (True, False):
        model.train(training)
        assert npt.trace(model, run=run) is None
        assert npt.trace(model, arguments) is None
        assert npt.trace(model, run=run, limit=1e12) is None


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1)
    ),
    "Llama without a head": lambda: LlamaModel(LlamaConfig(**TINY)),
    "classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**TINY)),
    "BERT": lambda: BertForSequenceClassification(
        BertConfig(**{k: v for k, v in TINY.items() if k != "num_key_value_heads"})
    ),
    "masks that say True for masked": lambda: MptForCausalLM(
        MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_sound_models_of_transformers_give_no_alarm(name) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    for side in PADDING:
        assert npt.trace(model, padded(side)) is None


def test_outputs_that_are_masked_on_purpose_are_sound() -> None:
    assert npt.trace(Step(lambda x: x), run=lambda: X.masked_fill(X > 0, -INF)) is None
    verdict = npt.trace(Step(lambda x: x), run=lambda: X.masked_fill(X > 0, -INF).sum())
    check(verdict, cause="written constant")


# --- masks that leave a token without keys


@pytest.mark.parametrize("form", ["bool", "finfo.min"])
@pytest.mark.parametrize("given", ["batch", "run"])
def test_a_valid_token_without_keys_is_a_fault_though_all_is_finite(form, given) -> None:
    model = llama("sdpa" if form == "bool" else "eager")

    def spoil(
        _module: nn.Module, arguments: tuple, keywords: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        mask = keywords["attention_mask"].clone()
        mask[1, :, 2] = False if form == "bool" else torch.finfo(torch.float32).min
        return arguments, {**keywords, "attention_mask": mask}

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(spoil, with_kwargs=True)
    batch = padded("right")
    arguments = (
        {"batch": batch} if given == "batch" else {"run": lambda: model(**batch, labels=IDS)}
    )
    verdict = npt.trace(model, **arguments)
    handle.remove()
    check(verdict, cause="fully masked row")
    check(verdict, module="model.layers.1.self_attn", layer=1)
    check(verdict, row=1, token=2)
    assert not any(module._forward_pre_hooks for module in model.modules())


# --- faults of any module


@pytest.mark.parametrize("name", ["GPT-2", "Llama, sdpa"])
def test_a_bad_element_of_a_weight_is_named_with_module_and_index(name) -> None:
    model = MODELS[name]() if name in MODELS else llama(name.split()[1])
    generator = torch.Generator().manual_seed(1)
    for weight, parameter in model.named_parameters():
        if ".0." in weight or (".h." in weight and weight.endswith("bias")):
            continue  # of the same kind as those of layer 1, and as its weights
        index = tuple(int(torch.randint(n, (1,), generator=generator)) for n in parameter.shape)
        if "embed" in weight or "wte" in weight:
            index = (int(IDS[1, 4]), index[1])  # of a table a row that is read
        elif "wpe" in weight:
            index = (4, index[1])
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter[index] = (NAN, INF)[index[0] % 2]
        verdict = npt.trace(model, {"input_ids": IDS})
        with torch.no_grad():
            parameter.copy_(before)
        assert verdict is not None and verdict.cause == "corrupt weight", weight
        assert (f"{verdict.module}.{weight.rpartition('.')[2]}", verdict.index) == (weight, index)
        inside = weight.split(".")[1] in ("layers", "h")
        assert verdict.layer == (int(weight.split(".")[2]) if inside else None)
    assert npt.trace(model, {"input_ids": IDS}) is None


def test_a_bad_number_out_of_any_module_is_named_with_its_token() -> None:
    model = llama("sdpa")
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) or name.endswith(("rotary_emb", "mlp", "self_attn")):
            continue
        # modules of the same kind as others
        alike = "layers.0" in name or name.endswith(("k_proj", "up_proj"))
        if name in ("", "model") or alike:
            continue

        def spoil(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
            at = torch.zeros(output.shape, dtype=torch.bool)
            at[1, 3, 5] = True
            return output.masked_fill(at, NAN)

        handle = module.register_forward_hook(spoil)
        verdict = npt.trace(model, padded("right"))
        handle.remove()
        assert verdict is not None
        check(verdict, module=name, operation="masked_fill", index=(1, 3, 5))
        check(verdict, row=1, token=3, phase="forward")


def test_a_weight_that_is_shared_is_named_as_its_reader_knows_it() -> None:
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    with torch.no_grad():
        embedding.weight[5, 2] = NAN
    verdict = npt.trace(model, run=lambda: head(embedding(torch.tensor([1, 2]))).sum())
    check(verdict, module="head", tensor="head.weight [6, 4] float32")
    assert verdict.index == (5, 2)
    verdict = npt.trace(model, run=lambda: head(embedding(torch.tensor([1, 5]))).sum())
    check(verdict, module="embedding", index=(5, 2))


def test_a_target_from_a_closure_is_from_outside() -> None:
    target = X.masked_fill(X > 1, NAN)
    model = Step()
    verdict = npt.trace(model, run=lambda: F.mse_loss(model(X), target))
    check(verdict, cause="outside of torch", operation="mse_loss")
    assert "tensors made before it" in verdict.remedy


def test_a_loss_that_nothing_made_bad_is_from_outside() -> None:
    model = Step()
    model.first.weight.grad = None

    def run() -> Tensor:
        loss = torch.zeros(4)
        (ctypes.c_float * 4).from_address(loss.data_ptr())[0] = NAN
        return loss[0]

    verdict = npt.trace(model, run=run)
    check(verdict, cause="outside of torch", operation="")


def test_unknown_token_ids_and_labels_are_refused_before_the_lookup() -> None:
    model = llama()
    for value in (64, -1, -65, -100):
        ids = IDS.clone()
        ids[1, 3] = value
        verdict = npt.trace(model, {"input_ids": ids})
        check(verdict, cause="token id", index=(1, 3), value=value)
        assert f"the id {value} is outside [0, 64) (ids outside: 1)" in verdict.explanation
    labels = IDS.clone()
    labels[2, 1] = 99
    verdict = npt.trace(model, {"input_ids": IDS, "labels": labels})
    check(verdict, operation="cross_entropy", row=2, token=1)


def test_a_language_model_without_any_label_is_told_so() -> None:
    verdict = npt.trace(llama(), {"input_ids": IDS, "labels": torch.full_like(IDS, -100)})
    check(verdict, cause="no valid label")


# --- faults of backward


def test_a_fault_of_backward_has_its_forwards_module_and_line() -> None:
    verdict = fault(net(root_of_zero))
    check(verdict, phase="backward", operation="div in SqrtBackward0", module="1")
    assert verdict.source.endswith("in root_of_zero: (x * 0).sqrt()")
    assert verdict.reached.startswith("gradient of 0.weight")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("function", "operation", "phase"),
    [(root_of_zero, "div in SqrtBackward0", "backward"), (log_of_zero, "log", "forward")],
)
def test_under_a_checkpoint_the_same_is_said(reentrant, function, operation, phase) -> None:
    model = net(function)

    def run() -> Tensor:
        return model[2](checkpoint(model[1], model[0](X), use_reentrant=reentrant)).square().sum()

    verdict = npt.trace(model, run=run)
    assert verdict is not None
    check(verdict, phase=phase, operation=operation, module="1")
    assert function.__name__ in verdict.source


def nan_gradient(model: nn.Module) -> Any:
    return model[2].weight.register_hook(lambda g: g.masked_fill(g == g, NAN))


def nan_accumulated(model: nn.Module) -> Any:
    def spoil(parameter: Tensor) -> None:
        parameter.grad.mul_(INF)

    return model[2].weight.register_post_accumulate_grad_hook(spoil)


def nan_of_a_module(model: nn.Module) -> Any:
    return model[1].last.register_full_backward_hook(lambda module, given, _: (given[0] / 0,))


def nan_of_a_tensor(model: nn.Module) -> Any:
    def hooked(x: Tensor) -> Tensor:
        x = x * 2
        x.register_hook(lambda gradient: gradient * NAN)
        return x

    model[1].function = hooked


@pytest.mark.parametrize(
    ("hook", "operation", "module"),
    [
        (nan_of_a_tensor, "mul", "1"),
        (nan_of_a_module, "div", "1.last"),
        (nan_gradient, "masked_fill", "2"),
        (nan_accumulated, "mul_", "2"),
    ],
)
def test_a_hook_that_writes_gradients_is_shown_with_its_module(hook, operation, module) -> None:
    model = net(lambda x: x)
    hook(model)
    check(fault(model), phase="backward", operation=operation, module=module)


def test_of_a_backward_of_a_backward_the_forward_line_is_found() -> None:
    model = net(lambda x: x.abs().pow(1.5) + (x * 0).abs().pow(1.5))

    def run() -> Tensor:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.square().sum()

    verdict = npt.trace(model, run=run)
    check(verdict, phase="backward", cause="infinite slope")
    assert verdict.module == "1" and "pow(1.5)" in verdict.source


# --- limits and growth


def test_with_a_limit_the_first_number_beyond_it_is_named() -> None:
    model = nn.Sequential(*(Scale(10.0) for _ in range(6)))
    verdict = npt.trace(model, torch.ones(2, 4), limit=300.0)
    check(verdict, cause="beyond the limit", reached="a value above 300")
    check(verdict, module="2", operation="mul", value=1000.0, index=(0, 0))
    assert npt.trace(model, torch.ones(2, 4), limit=1e6) is None
    assert npt.trace(model, torch.ones(2, 4)) is None


class Scale(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_with_a_limit_a_hidden_nan_is_no_fault_and_another_one_is() -> None:
    hidden = net(lambda x: torch.where(x == x, x, (x.detach() - x.detach()) / 0))
    assert traced(hidden, limit=1e6) is None
    assert fault(net(log_of_zero), limit=1e6).operation == "log"


@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_growth_is_told_half_of_the_way_in_orders_of_magnitude(factor) -> None:
    model = nn.Sequential(*(Scale(factor) for _ in range(25)))
    verdict = npt.trace(model, torch.ones(2, 4), run=lambda: model(torch.ones(2, 4)).sum())
    # 100^20 is the first that fp32 cannot hold, 100^10 the first past the root of the largest that
    # went in.
    check(verdict, module="19", cause="exploding product")
    assert " in mul in 9 at [0, 0] of [2, 4]: 1e+20, test_trace.py" in verdict.grew


def test_what_was_large_before_anything_was_computed_is_the_cause() -> None:
    model = net(torch.square)
    with torch.no_grad():
        model[0].weight[1, 1] = -1e25
    verdict = fault(model)
    grew = "0.weight[1, 1] was -1e+25 before the pass"
    check(verdict, cause="corrupt weight", grew=grew)
    large = X.clone()
    large[1, 2] = 3e25
    verdict = fault(net(torch.square), large)
    check(verdict, cause="corrupt input", grew="input[1, 2] was 3e+25 before the pass")


@pytest.mark.parametrize("size", [-3e38, 3e38])
def test_a_huge_input_of_the_loss_alone_is_named(size) -> None:
    """As TRL's advantages where a reward is infinite, whose negative could be a mask."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4))
    batch = {"x": X, "advantages": torch.tensor([1.0, size, 1.0])}
    with torch.no_grad():  # the slope of the norm is steep, and the gradient overflows there
        model[0].weight.mul_(1e-3)

    def run() -> Tensor:
        return (model(batch["x"]).mean(-1) * batch["advantages"]).mean() * 0.1

    verdict = npt.trace(model, batch, run=run)
    held = f"advantages held {size:g} before the pass; "
    assert verdict is not None
    assert verdict.cause == "corrupt input" and verdict.explanation.startswith(held)
    assert "what the reward function returns" in verdict.remedy


# --- memory


def test_harmless_bad_numbers_of_a_large_model_are_not_held() -> None:
    kept: list[StorageWeakRef] = []
    largest = 0

    def function(x: Tensor) -> Tensor:
        nonlocal largest
        bad = (x.detach() - x.detach()) / 0
        kept.append(StorageWeakRef(bad.untyped_storage()))
        largest = max(largest, sum(not storage.expired() for storage in kept))
        return torch.where(x == x, x, bad.nan_to_num())

    model = nn.Sequential(*(net(function) for _ in range(20)), net(log_of_zero))
    assert fault(model).operation == "log"
    assert largest <= 2
