"""Faults in small plain torch modules, for the tracer to find, each with its true place.

The models are of the kinds that the embedded language model is not: convolutions, recurrent
networks, losses and penalties written by hand. `build(bad)` returns one with the input that makes
the NaN, or with a harmless one: the same code must then give no alarm.

The truth follows from the input. Its line is marked in the code (see `places.py`).

Shapes: B samples, T steps, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from faults.places import Truth


@dataclass(frozen=True)
class Subject:
    """What a tool is asked about: a model, its inputs, and one pass that returns the loss, or None
    for the model's own forward and loss.
    """

    model: nn.Module
    batch: Any
    run: Callable[[], Any] | None


@dataclass(frozen=True)
class ModuleCase:
    """A planted fault. build: the model with the fault, or without it."""

    id: str
    name: str
    group: str
    truth: Truth
    build: Callable[[bool], Subject]


def pass_on(layer: Any) -> None:
    """Make a linear layer return its input, or the first parts of it."""
    with torch.no_grad():
        layer.weight.copy_(torch.eye(*layer.weight.shape))
        if layer.bias is not None:
            layer.bias.zero_()


# --- forward, in a module


class ConvolutionNet(nn.Module):
    """A convolution with batch norm, whose running variance an extrapolated average of checkpoints
    made negative.
    """

    def __init__(self, bad: bool):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.norm.get_buffer("running_var")[2] = -0.25 if bad else 0.25

    def forward(self, image: Tensor) -> Tensor:
        normal = self.norm(self.convolution(image))  # planted: negative-variance
        return self.head(normal.relu().mean((2, 3)))


def negative_variance(bad: bool) -> Subject:
    model, image = ConvolutionNet(bad).eval(), torch.randn(5, 1, 8, 8)
    return Subject(model, image, lambda: F.cross_entropy(model(image), torch.arange(5) % 3))


class SequenceMean(nn.Module):
    """A GRU whose states are averaged over the valid steps of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.recurrent = nn.GRU(6, 8, batch_first=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(ids))
        valid = torch.arange(ids.shape[1]) < lengths[:, None]
        total = torch.where(valid[..., None], states, 0.0).sum(1)
        return total / lengths[:, None]  # planted: empty-sequence


def empty_sequence(bad: bool) -> Subject:
    model, ids = SequenceMean(), torch.randint(11, (4, 7))
    lengths = torch.tensor([7, 3, 0 if bad else 1, 5])
    return Subject(model, (ids, lengths), lambda: model(ids, lengths).square().mean())


class Encoder(nn.Module):
    """One layer of a transformer encoder that also returns its attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x, key_padding_mask=padding)  # planted: padded-row
        return x + self.mlp(self.norm(x + mixed))


def padded_row(bad: bool) -> Subject:
    model, x = Encoder(), torch.randn(3, 5, 8)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 0 if bad else 2 :] = True
    # by keyword, as transformers' hooks fail on a bool among the arguments
    run = lambda: model(x, padding=padding)[~padding].square().sum()  # noqa: E731
    return Subject(model, {"x": x, "padding": padding}, run)


class Gamma(nn.Module):
    """Gamma correction, which needs images from 0 to 1."""

    def forward(self, image: Tensor) -> Tensor:
        return image**0.45  # planted: negative-base


def negative_base(bad: bool) -> Subject:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sigmoid(), Gamma(), nn.Flatten(), nn.Linear(48, 2))
    image = torch.rand(2, 3, 4, 4)
    if bad:  # the sigmoid is forgotten, and one channel is negative
        model[1] = nn.Identity()
        with torch.no_grad():
            model.get_parameter("0.weight").abs_()
            model.get_parameter("0.bias").copy_(torch.tensor([1.0, -9.0, 1.0]))
    return Subject(model, image, lambda: model(image).square().mean())


class Scores(nn.Module):
    """Causal attention scores without the scale. What lies in the future is -Inf."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.transpose(1, 2)  # planted: half-scores
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -torch.inf)


class HalfAttention(nn.Module):
    """Attention with its scores in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scores = Scores()

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.query(x).half(), self.key(x).half())
        return scores.float().softmax(-1) @ x


def half_scores(bad: bool) -> Subject:
    model, x = HalfAttention(), torch.randn(2, 4, 8)
    if bad:
        pass_on(model.query)
        pass_on(model.key)
        x[1, 2] = 200.0  # 8 times 200 squared is beyond 65504
    return Subject(model, x, lambda: model(x).square().mean())


class GaussianHead(nn.Module):
    """A mean, and a variance that is the exponential of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_variance = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        variance = self.log_variance(x).exp()  # planted: huge-variance
        return self.mean(x), variance


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = GaussianHead()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(x))


def huge_variance(bad: bool) -> Subject:
    model, x, y = Regression(), torch.randn(6, 4), torch.randn(6, 1)
    if bad:
        x[3] = 50.0
        pass_on(model.body[0])
        with torch.no_grad():
            model.head.log_variance.weight.fill_(30.0)

    def likelihood() -> Tensor:
        mean, variance = model(x)
        return (variance.log() + (y - mean).square() / variance).mean()

    return Subject(model, x, likelihood)


class FastNorm(nn.Module):
    """A layer norm by E[x^2] - E[x]^2, which cancels in bf16 if the mean is large."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True) - mean.square()
        return (x - mean) * variance.add(1e-5).rsqrt()  # planted: cancelled-variance


def cancelled_variance(bad: bool) -> Subject:
    model = nn.Sequential(nn.Linear(4, 4), FastNorm(), nn.Linear(4, 2)).bfloat16()
    x = torch.randn(3, 4).bfloat16()
    if bad:
        pass_on(model[0])
        x[2] = CANCELS.bfloat16()
    return Subject(model, x, lambda: model(x).float().square().mean())


CANCELS = torch.tensor([10.0, 10.0, 10.125, 10.125])
"""Numbers whose mean of squares is rounded to less than the square of their mean."""


class Quantizer(nn.Module):
    """Codes that become the mean of the states nearest to them, written in place."""

    codes: Tensor

    def __init__(self, codes: Tensor):
        super().__init__()
        self.register_buffer("codes", codes)

    def forward(self, states: Tensor) -> Tensor:
        nearest = torch.cdist(states.detach(), self.codes).argmin(1)
        chosen = F.one_hot(nearest, len(self.codes)).to(states.dtype)
        means = chosen.T @ states
        means.div_(chosen.sum(0)[:, None])  # planted: unused-code
        return means


def unused_code(bad: bool) -> Subject:
    codes = torch.tensor([[0.0, 0.0], [4.0, 4.0], [99.0, 99.0] if bad else [4.0, -4.0]])
    model = nn.Sequential(nn.Linear(2, 2), Quantizer(codes))
    pass_on(model[0])
    states = torch.tensor([[0.1, 0.2], [3.9, 4.1], [4.0, -4.1], [0.3, 0.1]])
    return Subject(model, states, lambda: model(states).square().sum())


# --- forward, in a loss outside of the model


def short_audio(bad: bool) -> Subject:
    """CTC, with more labels than frames in one sample."""
    model, audio = nn.Conv1d(2, 5, 4, stride=4), torch.randn(3, 2, 32)
    labels = torch.tensor([[1, 2, 3, 4, 1, 2], [2, 2, 0, 0, 0, 0], [1, 2, 3, 4, 1, 2]])
    lengths = torch.tensor([6, 2, 6])
    frames = torch.tensor([8, 2 if bad else 3, 8])

    def loss() -> Tensor:
        logs = model(audio).log_softmax(1).permute(2, 0, 1)
        return F.ctc_loss(logs, labels, frames, lengths)  # planted: short-audio

    return Subject(model, audio, loss)


def sure_answer(bad: bool) -> Subject:
    """Binary cross-entropy by hand, of a probability that is rounded to 1."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Sigmoid())
    x, y = 0.1 * torch.randn(5, 3), torch.ones(5, 1)
    if bad:
        x[4] = 10.0
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(1.0)
            model.get_parameter("2.weight").fill_(5.0)

    def loss() -> Tensor:
        p = model(x)
        right = y * p.log()
        wrong = (1 - y) * (1 - p).log()  # planted: sure-answer
        return -(right + wrong).mean()

    return Subject(model, x, loss)


def equal_rewards(bad: bool) -> Subject:
    """Advantages relative to a group whose rewards are all equal."""
    model, x = nn.Linear(4, 5), torch.randn(3, 2, 4)
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0 if bad else 0.5], [0.0, 0.5]])

    def loss() -> Tensor:
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = centred / rewards.std(1, keepdim=True)  # planted: equal-rewards
        return -(model(x).log_softmax(-1)[..., 0] * advantages).mean()

    return Subject(model, x, loss)


# --- backward


class Angle(nn.Module):
    """The angle between two embeddings of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 2, bias=False)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        a, b = F.normalize(self.embed(one), dim=-1), F.normalize(self.embed(other), dim=-1)
        cosine = (a * b).sum(-1).clamp(-1.0, 1.0)
        return cosine.acos()  # planted: equal-pair


def equal_pair(bad: bool) -> Subject:
    model, one, other = Angle(), torch.randn(4, 3), torch.randn(4, 3)
    if bad:
        pass_on(model.embed)
        one[2] = other[2] = torch.tensor([2.0, 0.0, 0.0])  # their cosine is 1 without rounding
    return Subject(model, (one, other), lambda: model(one, other).mean())


def no_slope(bad: bool) -> Subject:
    """A gradient penalty on a critic with |x|^1.5, whose second derivative at 0 is infinite."""
    model, x = Critic(), torch.randn(3, 4)
    if bad:
        x[1] = 0.0

    def penalty() -> Tensor:
        real = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(real).sum(), real, create_graph=True)
        return (slope.square().sum(1) - 1.0).square().mean()

    return Subject(model, x, penalty)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        steep = self.layer(x).abs() ** 1.5  # planted: gradient-penalty
        return self.head(steep)


class Distances(nn.Module):
    """The distances of all pairs, with the root of 0 hidden by a `where`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        points = self.embed(x)
        squares = (points[:, None] - points[None]).square().sum(-1)
        near = squares == 0
        roots = self.safe(squares, near).sqrt()  # planted: zero-distance
        return torch.where(near, 0.0, roots)

    def safe(self, squares: Tensor, near: Tensor) -> Tensor:
        return squares


class SafeDistances(Distances):
    """The same with the argument made safe before the root."""

    def safe(self, squares: Tensor, near: Tensor) -> Tensor:
        return torch.where(near, 1.0, squares)


def zero_distance(bad: bool) -> Subject:
    model, x = Distances() if bad else SafeDistances(), torch.randn(3, 3)
    return Subject(model, x, lambda: model(x).mean())


class OwnSoftplus(torch.autograd.Function):
    """log(1 + e^x), safe in forward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.softplus(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        grown = x.exp()  # planted: own-softplus
        return gradients[0] * grown / (1 + grown)


class Softplus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OwnSoftplus.apply(x)


def own_softplus(bad: bool) -> Subject:
    last = Last(1000.0 if bad else 1.0)
    model = nn.Sequential(nn.LSTM(3, 4, batch_first=True), last, Softplus(), nn.Linear(4, 1))
    x = torch.randn(2, 5, 3)
    if bad:
        with torch.no_grad():
            for weight in model[0].parameters():
                weight.fill_(1.0)
            x[0], x[1] = -9.0, 9.0  # states near -1 and 1
    return Subject(model, x, lambda: model(x).square().mean())


class Last(nn.Module):
    """The last state of a recurrent network, scaled."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, output: tuple[Tensor, Any]) -> Tensor:
        return output[0][:, -1] * self.scale


# Unformatted table: the formatter would write one word a line.
# fmt: off

MODULE_CASES = (
    ModuleCase("negative-variance", "batch norm in eval mode with a running variance of -0.25",
               "weight",
               Truth("forward", "norm", "native_batch_norm", (0, 2, 0, 0), "corrupt weight"),
               negative_variance),
    ModuleCase("empty-sequence", "a GRU's mean over a sequence of length 0", "division",
               Truth("forward", "", "div", (2, 0), "vanishing norm"), empty_sequence),
    ModuleCase("padded-row", "an encoder's padding mask that hides a whole row", "mask",
               Truth("forward", "attention", "_softmax", (2, 0, 0), "fully masked row"),
               padded_row),
    ModuleCase("negative-base", "a fractional power of a negative number", "forward",
               Truth("forward", "2", "pow", (0, 1, 0, 0), "invalid argument"), negative_base),
    ModuleCase("half-scores", "attention scores beyond fp16", "cast",
               Truth("forward", "scores", "bmm", (1, 2, 2), "low-precision overflow"),
               half_scores),
    ModuleCase("huge-variance", "the exponential of 120 in a Gaussian head", "forward",
               Truth("forward", "head", "exp", (3, 0), "exponential overflow"), huge_variance),
    ModuleCase("cancelled-variance", "E[x^2] - E[x]^2 below 0 in bf16", "cast",
               Truth("forward", "1", "rsqrt", (2, 0), "invalid argument"), cancelled_variance),
    ModuleCase("unused-code", "the mean of no states, in place", "division",
               Truth("forward", "1", "div_", (2, 0), "vanishing norm"), unused_code),
    ModuleCase("short-audio", "CTC with more labels than frames", "data",
               Truth("forward", "", "_ctc_loss", (1,), "too few frames"), short_audio),
    ModuleCase("sure-answer", "the logarithm of 1 - 1 in a loss", "forward",
               Truth("forward", "", "log", (4, 0), "invalid argument"), sure_answer),
    ModuleCase("equal-rewards", "advantages of a group with equal rewards", "division",
               Truth("forward", "", "div", (1, 0), "vanishing norm"), equal_rewards),
    ModuleCase("equal-pair", "the derivative of acos at 1", "backward",
               Truth("backward", "", "rsqrt in AcosBackward0", (2,), "infinite slope"),
               equal_pair),
    ModuleCase("gradient-penalty", "the second derivative of |x|^1.5 at 0", "backward",
               Truth("backward", "", "pow in PowBackward0", (1, 0), "infinite slope"), no_slope),
    ModuleCase("zero-distance", "the derivative of a square root at 0, hidden by where",
               "backward",
               Truth("backward", "", "div in SqrtBackward0", (0, 0), "masked gradient"),
               zero_distance),
    ModuleCase("own-softplus", "a custom function whose backward computes exp(1000)", "backward",
               Truth("backward", "2", "exp", (1, 0), "exponential overflow"), own_softplus),
)
# fmt: on
