"""The part of a converted layer that is linear or known in closed form: from a's modulation to o,
and its derivative.

The frozen gate_proj and up_proj read x, which no adapter touches, so in the adapter's parameters
the layer is

    o = h + mod_down(W_down (silu(mod_gate(g)) * mod_up(u))),      mod(y) = m(M z) * y + alpha B z,
    z = A a

`pulled` gives J' r for rows r, J being the Jacobian of o in (A, B, M), exactly. In this module B
means alpha B, and parameters have short names: A, B.gate, M.down and so on.

Shapes: N tokens, D hidden, F ffn, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from npt.adapters.layer import NPTLayer
from npt.base.families import LAYER_PARTS, missing_parts
from npt.base.hooks import may_change
from npt.base.linear import check_readable, dense_weight
from npt.config import PRODUCTS, TARGETS
from npt.errors import ModelError

Parameters = dict[str, Tensor]
"""A [R, D]; B.gate, B.up, M.gate, M.up [F, R]; B.down, M.down [D, R]: those of the adapter's form.
"""


@dataclass(frozen=True)
class Linearised:
    """The layer linearised at some parameters, for [N] tokens.

    output: o - h, [N, D]. a: [N, D]. z: [N, R]. into: by target, the factor between a change of the
    modulated product and of down_proj's input ([N, F]; not for down). slope: by target,
    dm/d(Mz) * y, if there is an M. down_m: m of down.
    """

    output: Tensor
    a: Tensor
    z: Tensor
    into: dict[str, Tensor]
    slope: dict[str, Tensor]
    down_m: Tensor | None


def check_layer_readable(index: int, layer: NPTLayer) -> None:
    """Refuse a layer that is more than its `Tail`: with a part that is not a plain linear layer, or
    with a hook that may change a value.
    """
    missing = missing_parts(layer, LAYER_PARTS)
    if missing:
        raise ModelError(
            f"layer {index} has no {', '.join(missing)} any more, and a calibrated start needs its"
            " weights; start with --init random"
        )
    for name in (target.module for target in PRODUCTS.values()):
        check_readable(f"layer {index}'s {name}", layer.get_submodule(name), "a calibrated start")
    for place, module in (("", layer), (".mlp", layer.mlp), (".mlp.act_fn", layer.mlp.act_fn)):
        if may_change(module):
            raise ModelError(
                f"model.layers.{index}{place} has hooks that may change what it gives, or another"
                " forward, which a calibrated start would leave out; remove them, or start with"
                " --init random"
            )


class Tail:
    """One layer's frozen weights, dense and in fp32, and the maths on them. Its adapter gives the
    form alone, never numbers.
    """

    def __init__(self, layer: NPTLayer):
        self.layer, self.config = layer, layer.npt.config
        self.targets = tuple(target for target in PRODUCTS if target in self.config.targets)
        self.beta = self.config.mult_bound
        mlp = layer.mlp
        self.gate, self.up, self.down = (
            dense_weight(p).to(torch.float32) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.biases: dict[str, Any] = {
            name: getattr(layer.get_submodule(target.module), "bias", None)
            for name, target in PRODUCTS.items()
        }

    def form(self, rank: int) -> Parameters:
        """Return zeros for every B and M that an adapter of this form and rank has."""
        sizes = dict(zip(("hidden", "ffn"), self.down.shape, strict=True))
        kinds = "B" * self.config.additive + "M" * self.config.multiplicative
        return {
            f"{kind}.{target}": self.down.new_zeros(sizes[TARGETS[target].width], rank)
            for kind in kinds
            for target in self.config.targets
        }

    def products(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up [N, F] of the residual stream [N, D] that the MLP reads."""
        x = self.layer.post_attention_layernorm(stream).to(torch.float32)
        return F.linear(x, self.gate, self.biases["gate"]), F.linear(x, self.up, self.biases["up"])

    def at(self, p: Parameters, h: Tensor, a: Tensor) -> Linearised:
        """Linearise the layer at parameters `p`, from h and a [N, D] of the same tokens."""
        gate, up = self.products(h)
        z = F.linear(a, p["A"])
        slope: dict[str, Tensor] = {}
        gate, _ = self._modulated("gate", gate, z, p, slope)
        up, _ = self._modulated("up", up, z, p, slope)
        activation, derivative = self._activation(gate)
        product = F.linear(activation * up, self.down, self.biases["down"])
        output, down_m = self._modulated("down", product, z, p, slope)
        return Linearised(output, a, z, {"gate": derivative * up, "up": activation}, slope, down_m)

    def _modulated(
        self, target: str, y: Tensor, z: Tensor, p: Parameters, slope: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        m = None
        out = y
        if f"M.{target}" in p:
            tanh = torch.tanh(0.5 * F.linear(z, p[f"M.{target}"]))
            m = 1.0 + self.beta * tanh
            slope[target] = (0.5 * self.beta) * (1.0 - tanh * tanh) * y
            out = m * y
        if f"B.{target}" in p:
            out = out + F.linear(z, p[f"B.{target}"])
        return out, m

    def _activation(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Return act(gate) and its derivative, for the elementwise activation of any family."""
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            value = self.layer.mlp.act_fn(leaf)
            (derivative,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), derivative

    def pulled(self, p: Parameters, r: Tensor, at: Linearised) -> Parameters:
        """Return J' r of rows r [N, D], summed over the tokens: a change per parameter."""
        found: Parameters = {}
        to_z = torch.zeros_like(at.z)

        def take(target: str, g: Tensor) -> None:
            nonlocal to_z
            for kind in "BM":
                name = f"{kind}.{target}"
                if name in p:
                    g = g * at.slope[target] if kind == "M" else g
                    found[name] = g.T @ at.z
                    to_z = to_z + g @ p[name]

        if "down" in self.targets:
            take("down", r)
        if self.targets != ("down",):
            product = (r if at.down_m is None else at.down_m * r) @ self.down
            for target in ("gate", "up"):
                if target in self.targets:
                    take(target, product * at.into[target])
        found["A"] = to_z.T @ at.a
        return {name: found[name] for name in p}
