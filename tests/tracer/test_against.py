"""`trace(against=)`: planted partings are found at their operation, and rounding is none."""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import pytest
import safetensors.torch
import torch
from mutations import mutated, mutated_bytes, mutated_tensors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import npt
from npt.batch import batches
from npt.data.samples import Samples
from npt.distill.step import forward_backward
from npt.distill.strategies import drive
from npt.errors import ConfigError
from npt.tracer.pass_record import PassRecord

LAYERS = 3
BATCH = {"input_ids": torch.randint(5, 500, (2, 20), generator=torch.Generator().manual_seed(0))}


def tiny(**settings: Any) -> Any:
    model = npt.load_base("tiny", **settings)[0].eval()
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    return model


@pytest.fixture(scope="module")
def bases(load_model: Any) -> dict[str, Any]:
    """By attention implementation, and `fp32`, unquantised."""
    return {
        "sdpa": tiny(quantization="nf4"),
        "eager": tiny(quantization="nf4", attn_implementation="eager"),
        "fp32": tiny(quantization=None),
    }


def lowered(model: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A copy of other parameters; buffers, rotary frequencies among them, stay as they are."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


# --- planted partings


def scaled(name: str, attribute: str, factor: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        module = model.get_submodule(name)
        value = getattr(module, attribute)
        if isinstance(value, Tensor):
            value.data.mul_(factor)
        else:
            setattr(module, attribute, value * factor)

    return plant


def other_statistic(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.quant_state.absmax[7] += 1


def swapped(model: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def weaker_residual(model: Any) -> None:
    hook = lambda _module, given: (given[0] * 0.99,)  # noqa: E731
    model.model.layers[1].post_attention_layernorm.register_forward_pre_hook(hook)


def rounded_operands(model: Any) -> None:
    """A product as TF32 computes it: 10 bits of what goes in."""

    def rounded(x: Tensor) -> Tensor:
        return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)

    def forward(x: Tensor) -> Tensor:
        return F.linear(rounded(x), rounded(model.lm_head.weight.float()))

    model.lm_head.forward = forward


def shifted_mask(model: Any) -> None:
    """Every token sees its successor."""
    attention = model.model.layers[0].self_attn

    def shift(_module: Any, args: Any, kwargs: Any) -> Any:
        tokens = BATCH["input_ids"].shape[1]
        mask = torch.ones(1, 1, tokens, tokens).triu(2) * torch.finfo(torch.float32).min
        return args, {**kwargs, "attention_mask": mask}

    attention.register_forward_pre_hook(shift, with_kwargs=True)


def low_softmax(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    own, softmax = attention.forward, F.softmax

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(F, "softmax", lambda x, dim, dtype: softmax(x.bfloat16(), dim=dim)):
            return own(*args, **kwargs)

    attention.forward = forward


def dropout_left_on(model: Any) -> None:
    model.model.layers[2].self_attn.attention_dropout = 0.1
    model.model.layers[2].self_attn.training = True


def rounded_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda _m, _i, out: out.half().float())


ROUNDED = "rounding to float16 or TF32 would explain it"
L, PACKED = "model.layers.", "gemm_4bit linear"
NORM, INPUT = f"{L}1.post_attention_layernorm", f"{L}2.input_layernorm"
ATTENTION, ROTARY = f"{L}1.self_attn", "model.rotary_emb"
# what is planted in which base, the operation where it parts, and what is said
PLANTED: dict[str, tuple[str, Callable[[Any], None], str, str, str]] = {
    "weight": (
        "sdpa",
        scaled(NORM, "weight", 1.01),
        NORM,
        "mul",
        "weight has a relative difference of 0.0092",
    ),
    "epsilon": ("sdpa", scaled(INPUT, "variance_epsilon", 1e3), INPUT, "add", ""),
    "rotary base": ("sdpa", scaled(ROTARY, "inv_freq", 1.01), ROTARY, "mul", ""),
    "4-bit statistic": (
        "sdpa",
        other_statistic,
        f"{L}1.mlp.down_proj",
        PACKED,
        "weight has a relative",
    ),
    "attention scale": ("eager", scaled(ATTENTION, "scaling", 1.001), ATTENTION, "mul", ""),
    "swapped": ("sdpa", swapped, f"{L}2.mlp.gate_proj", PACKED, ""),
    "fp16": ("sdpa", rounded_activation, f"{L}1.mlp", "mul", ROUNDED),
    "residual": ("sdpa", weaker_residual, NORM, "pow", "only this pass ran mul (test_against.py:"),
    "TF32": ("sdpa", rounded_operands, "lm_head", "mm", ROUNDED),
    "mask": ("eager", shifted_mask, f"{L}0.self_attn", "add", ""),
    "softmax": ("eager", low_softmax, ATTENTION, "_softmax", "to bfloat16 would explain it"),
    "dropout": ("eager", dropout_left_on, f"{L}2.self_attn", "bmm", "only this pass ran bernoulli"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_parting_is_found(case: str, bases: dict[str, Any]) -> None:
    kind, plant, module, operations, words = PLANTED[case]
    model = copy.deepcopy(bases[kind])
    plant(model)
    verdict = npt.trace(model, BATCH, against=bases[kind])
    assert verdict is not None and verdict.cause == "beyond rounding"
    assert (verdict.module, verdict.phase) == (module, "forward")
    assert verdict.operation in operations.split() and ".py:" in verdict.source
    assert words in verdict.explanation


def test_a_gradient_that_parts_is_found(bases: dict[str, Any]) -> None:
    """A hook on a gradient, of which forward shows nothing."""
    reference = copy.deepcopy(bases["fp32"]).requires_grad_(True)
    model = copy.deepcopy(reference)
    assert npt.trace(model, BATCH, against=reference) is None

    def stale(_module: Any, _inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 1.001)

    model.model.layers[1].mlp.up_proj.register_forward_hook(stale)
    verdict = npt.trace(model, BATCH, against=reference)
    assert verdict is not None and verdict.phase == "backward"
    assert (verdict.module, verdict.operation) == ("model.layers.1.mlp.up_proj", "mm")
    assert "only this pass ran mul" in verdict.explanation and "self.up_proj(x)" in verdict.source


@pytest.mark.parametrize("low", [True, False])
def test_a_rounded_buffer_is_named(low: bool, bases: dict[str, Any]) -> None:
    """`model.to(bfloat16)` rounds rotary frequencies too, which turns distant tokens wrongly."""
    rounded = copy.deepcopy(bases["fp32"]).to(torch.bfloat16)
    pair = (rounded, bases["fp32"]) if low else (bases["fp32"], rounded)
    verdict = npt.trace(pair[0], BATCH, against=pair[1])
    assert verdict is not None and verdict.module == ROTARY
    where = "this pass" if low else "the reference"
    said = f"the buffer {ROTARY}.inv_freq was rounded to bfloat16 in {where}: keep it in float32"
    assert said in verdict.explanation
    assert "would explain" not in verdict.explanation


def test_a_reference_of_zero_has_no_relative_difference() -> None:
    reference = nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 3))
    reference[0].weight.data.zero_()
    reference[0].bias.data.zero_()
    model = copy.deepcopy(reference)
    model[0].bias.data[7] = 2e-3
    verdict = npt.trace(model, torch.ones(2, 4), against=reference)
    assert verdict is not None and verdict.index == (0, 7)
    assert verdict.explanation.startswith(
        "the reference is 0 and this pass 0.002; rounding explains at most 1"
    )
    assert verdict.explanation.endswith("; 0.bias has only zeros in the reference")
    assert "would explain" not in verdict.explanation


def test_the_element_shown_is_of_the_row_that_parts() -> None:
    """Rounding makes elements of a larger row differ more."""
    torch.manual_seed(0)
    reference, x = nn.Linear(40, 40), torch.randn(200, 40)
    x[0] *= 1000
    model = lowered(reference)
    model.register_forward_pre_hook(lambda _module, given: given[0].to(torch.bfloat16))
    model.bias.data += 1
    verdict = npt.trace(model, x, against=reference)
    assert verdict is not None and verdict.index[0] != 0 and abs(verdict.value) < 10


# --- rounding is no parting


def trained(model: Any, attention: str = "sdpa") -> Any:
    model = copy.deepcopy(model).requires_grad_(True)
    model.set_attn_implementation(attention)
    return model


EQUAL = {
    "twice": lambda b: (b["sdpa"], b["sdpa"]),
    "eager": lambda b: (b["eager"], b["sdpa"]),
    "eager gradients": lambda b: (trained(b["fp32"], "eager"), trained(b["fp32"])),
    "bf16": lambda b: (lowered(b["fp32"]), b["fp32"]),
    "of bf16": lambda b: (b["fp32"], lowered(b["fp32"])),
    "fp16": lambda b: (lowered(b["fp32"], torch.float16), b["fp32"]),
    "bf16 products": lambda b: (tiny(quantization="nf4", compute_dtype="bf16"), b["sdpa"]),
    "fp64 gradients": lambda b: (trained(b["fp32"]).double(), trained(b["fp32"])),
    "bf16 gradients": lambda b: (lowered(trained(b["fp32"])), trained(b["fp32"])),
}


@pytest.mark.parametrize("pair", EQUAL)
@pytest.mark.parametrize("padded", [slice(15, 24), slice(9)], ids=["right", "left"])
def test_rounding_is_no_parting(pair: str, padded: slice, bases: dict[str, Any]) -> None:
    """Nor is what attention gives padded tokens on the left, which have no key."""
    model, reference = EQUAL[pair](bases)
    generator = torch.Generator().manual_seed(padded.stop)
    ids = torch.randint(5, 500, (2, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, padded] = 0
    assert npt.trace(model, {"input_ids": ids, "attention_mask": mask}, against=reference) is None


class Decay(nn.Module):
    """As in a state space model: a parameter that is used in fp32, whatever it is stored in."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.log_decay = nn.Parameter(torch.arange(1.0, 9.0).log())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.project(x.to(self.project.weight.dtype))
        return (hidden.float() * torch.exp(-self.log_decay.float().exp())).square().sum()


class Scaled(bitsandbytes.nn.Linear4bit):
    """A 4-bit layer with a forward of its own, as of another library."""

    scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def test_a_parting_in_a_foreign_4_bit_layer_has_a_verdict() -> None:
    torch.manual_seed(0)
    weight = bitsandbytes.nn.Params4bit(torch.randn(64, 64), requires_grad=False, quant_type="nf4")
    layer = Scaled(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.weight = weight.to("cpu")
    model, x = nn.Sequential(layer, nn.Linear(64, 64)), torch.randn(3, 64)
    reference = copy.deepcopy(model)
    model[0].scale = 2.5
    verdict = npt.trace(model, x, against=reference)
    assert verdict is not None and verdict.module == "0"


def test_the_rounding_of_a_parameter_that_is_read_as_fp32_is_no_parting(tmp_path: Path) -> None:
    """On either side, with a model and with a file; a change of the parameter still is one."""
    torch.manual_seed(0)
    model, x = Decay(), torch.randn(4, 8)
    low = lowered(model)
    for pair in ((low, model), (model, low)):
        file = tmp_path / f"{pair[0] is low}.safetensors"
        assert npt.trace(pair[0], x, against=pair[1]) is None
        assert npt.trace(pair[1], x, against=file) is None
        assert npt.trace(pair[0], x, against=file) is None
    low.log_decay.data[3] += 0.5
    verdict = npt.trace(low, x, against=model)
    assert verdict is not None and verdict.operation == "exp"
    assert "log_decay has a relative difference" in verdict.explanation


def test_more_threads_are_no_parting(bases: dict[str, Any]) -> None:
    """They divide sums otherwise."""
    model = copy.deepcopy(bases["fp32"]).requires_grad_(True)
    run = torch.get_num_threads()

    def threaded(given: Any) -> Any:
        torch.set_num_threads(run + (given is model))
        return given(**BATCH, labels=BATCH["input_ids"])

    try:
        assert npt.trace(model, BATCH, run=threaded, against=bases["fp32"]) is None
    finally:
        torch.set_num_threads(run)


# --- files


def test_a_file_is_written_and_compared_with(bases: dict[str, Any], tmp_path: Path) -> None:
    """As before and after an upgrade, with the operations of another attention too."""
    file = tmp_path / "before.safetensors"
    assert npt.trace(bases["sdpa"], BATCH, against=file) is None and file.is_file()
    written = file.read_bytes()
    for model in (bases["sdpa"], bases["eager"], tiny(quantization="nf4", compute_dtype="bf16")):
        assert npt.trace(model, BATCH, against=file) is None
    model = copy.deepcopy(bases["eager"])
    scaled("model.layers.1.self_attn", "scaling", 1.001)(model)
    verdict = npt.trace(model, BATCH, against=str(file))
    assert verdict is not None and verdict.module == "model.layers.1.self_attn.o_proj"
    assert (
        "_softmax (modeling_llama.py:" in verdict.explanation
        and "; the reference loss" in verdict.reached
    )
    assert file.read_bytes() == written


@pytest.mark.usefixtures("load_model")
def test_an_adapters_training_step(tmp_path: Path) -> None:
    """Forward and backward of `local`; a stale adapter tensor."""
    model, tokenizer = npt.load_base("tiny", quantization="nf4")
    npt.attach(model, npt.NPTConfig(rank=4, layers="6-7"))
    samples = Samples([{"text": "one two three four"}] * 2, tokenizer, npt.DataConfig(), seed=0)
    batch = next(batches(samples.epoch(0), 2))

    def run(given: Any) -> Any:
        return forward_backward(given, drive, batch, npt.TrainConfig())

    other = copy.deepcopy(model)
    assert npt.trace(model, batch, run=run, against=other) is None
    with torch.no_grad():
        model.model.layers[7].npt.A[1] += 0.01
    verdict = npt.trace(model, batch, run=run, against=other)
    assert verdict is not None and verdict.layer == 7
    assert "model.layers.7.npt.A has a relative" in verdict.explanation


def is_compared_by_its_modules(model: Any, batch: Any, other: Any, place: str, how: str) -> None:
    compiled: Any = torch.compile(model, backend=how)
    assert npt.trace(compiled, batch, against=other) is None
    model.get_submodule(place).variance_epsilon *= 1000
    verdict = npt.trace(compiled, batch, against=other)
    assert verdict is not None and (verdict.module, verdict.operation) == (place, "output")


def test_a_compiled_model_is_compared_by_its_modules(bases) -> None:
    reference = copy.deepcopy(bases["fp32"])
    reference.model.layers, reference.config.num_hidden_layers = reference.model.layers[:1], 1
    place = "model.layers.0.input_layernorm"
    is_compared_by_its_modules(copy.deepcopy(reference), BATCH, reference, place, "inductor")


@pytest.mark.parametrize("with_file", [True, False])
def test_a_compiled_model_is_compared_with_a_file_and_with_a_compiled_one(
    with_file, tmp_path
) -> None:
    reference = nn.Sequential(nn.Linear(8, 8), LlamaRMSNorm(8), nn.Linear(8, 8))
    compiled = torch.compile(reference, backend="eager")
    other = tmp_path / "file.safetensors" if with_file else compiled
    x = 0.01 * torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    is_compared_by_its_modules(copy.deepcopy(reference), x, other, "1", "eager")


class Rounded(nn.Module):
    """8-bit floats, and a function that is compiled as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.sine = torch.compile(torch.sin, backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.sine(torch.stack([x.to(torch.float8_e4m3fn)]).float())).sum()


def test_eight_bits_and_a_compiled_function_are_compared() -> None:
    model, x = Rounded(), torch.randn(4, 8)
    other = copy.deepcopy(model)
    assert npt.trace(model, x, against=other) is None
    model.out.weight.data.mul_(9)
    verdict = npt.trace(model, x, against=other)
    assert verdict is not None and (verdict.module, verdict.operation) == ("out", "addmm")


def stepping(model: Any) -> Any:
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return loss


@pytest.mark.parametrize(
    ("model", "run", "words"),
    [
        (None, None, "was not written by"),
        (nn.Linear(4, 5), None, "of the reference's"),
        (nn.Identity(), None, "of the reference's"),
        (nn.Linear(4, 4), stepping, "run wrote to weight"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, run, words, tmp_path) -> None:
    file = tmp_path / "file.safetensors"
    if model is None:
        safetensors.torch.save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ConfigError, match=words):
        for compared in (model or nn.Linear(4, 4), nn.Linear(4, 4)):
            npt.trace(compared, torch.zeros(2, 4), run=run, against=file)


DAMAGED = {
    "no JSON": ("not json", "JSONDecodeError"),
    "nested too deeply": ("[" * 100_000, "RecursionError"),
    "no list": ("3", "TypeError"),
    "a step that is none": ("[[1, 2]]", "ValueError"),
    "a step of numbers": ('[[1, 2, "a", 0, [1], 1]]', "are not all text"),
    "another shape": ('[["", "forward", "a", 0, [7], 1]]', "but its step [7]"),
    "a tensor too few": (
        '[["", "forward", "a", 0, [1], 1], ["", "f", "b", 0, [1], 1]]',
        "tensor 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    steps, words = DAMAGED[case]
    file = tmp_path / "file.safetensors"
    metadata = {"npt_trace": steps, "reads": "[0, 0]", "end": ""}
    safetensors.torch.save_file({"0": torch.zeros(1)}, file, metadata)
    with pytest.raises(ConfigError, match=r"is damaged (or unreadable: |\()") as refused:
        PassRecord.load(file)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_changed_file_is_compared_with_or_refused_in_one_line(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 40), nn.LayerNorm(40), nn.Linear(40, 2))
    file, source = tmp_path / "file.safetensors", random.Random(0)
    npt.trace(model, torch.ones(2, 4), against=file)
    whole, tensors = file.read_bytes(), safetensors.torch.load_file(file)
    with safetensors.safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    ended = Counter[str]()
    for number in range(300):
        if number % 3 == 0:
            file.write_bytes(mutated_bytes(whole, source))
        elif number % 3 == 1:
            safetensors.torch.save_file(mutated_tensors(tensors, source), file, metadata)
        else:
            part = source.choice(["npt_trace", "reads"])
            changed = json.dumps(mutated(json.loads(metadata[part]), source))
            safetensors.torch.save_file(tensors, file, {**metadata, part: changed})
        try:
            npt.trace(model, torch.ones(2, 4), against=file)
            ended["compared"] += 1
        except ConfigError as error:
            assert "\n" not in str(error)
            ended["refused"] += 1
    assert min(ended["compared"], ended["refused"]) > 30, ended
