"""`NPTAdapter`: the trainable A, B, M of one converted layer, in fp32 whatever the model around it
is cast to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from npt.adapters.modulation import modulate
from npt.adapters.recompute import is_recomputing
from npt.config import TARGETS, NPTConfig

Mode = Literal["student", "teacher", "floor"]
"""What the layer computes: the NPT form, the untouched base, or the NPT form without any modulation
(attention dropped).
"""

Observer = Callable[[dict[str, Tensor | None]], None]
"""Is shown stages of an NPT layer's pass by name, None where the adapter's form has no such stage.
It changes none of them.
"""


class NPTAdapter(nn.Module):
    """Low-rank modulation of a layer's MLP products by its attention output.

    Parameters, all fp32: `A` [R, D]; `B[target]` and `M[target]` [O, R], with O = F for gate and
    up, D for down. `observer`, where one is set, is shown the stages of each pass as they are
    computed, from `h` to `o`. `recode`, where one is set, puts other codes in the place of the
    tokens' own (npt/tools/editing/transplant.py).

    Args:
        config: form and size.
        hidden_size: D.
        ffn_size: F.
        generator: source of the random start, so that a seed fixes it; the device is the CPU.
    """

    def __init__(
        self,
        config: NPTConfig,
        hidden_size: int,
        ffn_size: int,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.config = config
        self.mode: Mode = "student"
        self.observer: Observer | None = None
        self.recode: Callable[[Tensor], Tensor] | None = None
        sizes = {"ffn": ffn_size, "hidden": hidden_size}
        widths = {name: sizes[target.width] for name, target in TARGETS.items()}
        # With the attention residual kept, the student has to equal its base at the start, so
        # nothing may be added.
        std_b = 0.0 if config.residual == "keep" else config.init_std_b

        def normal(rows: int, columns: int, std: float) -> nn.Parameter:
            if std == 0:
                return nn.Parameter(torch.zeros(rows, columns, dtype=torch.float32))
            return nn.Parameter(
                std * torch.randn(rows, columns, generator=generator, dtype=torch.float32)
            )

        self.A = normal(config.rank, hidden_size, config.init_std_a)
        if config.init_a == "kaiming":
            # as LoRA's A: uniform within 1 / sqrt(D)
            nn.init.kaiming_uniform_(self.A, a=math.sqrt(5), generator=generator)
        self.B = nn.ParameterDict(
            {t: normal(widths[t], config.rank, std_b) for t in config.targets if config.additive}
        )
        self.M = nn.ParameterDict(
            {
                t: normal(widths[t], config.rank, config.init_std_m)
                for t in config.targets
                if config.multiplicative
            }
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NPTAdapter:
        """Move with the model and keep every number: `model.half()`, `.to(torch.bfloat16)` and the
        like are meant for the base.
        """

        def moved(tensor: Tensor) -> Tensor:
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        return super()._apply(moved, recurse)

    def resize(self, other: NPTAdapter) -> None:
        """Take the sizes and numbers of another adapter, which is used up. Mode, observer and what
        is frozen stay, and so does the module: whoever holds it sees the new ones."""
        self.config = other.config
        frozen = {
            name for name, parameter in self.named_parameters() if not parameter.requires_grad
        }
        device = self.A.device
        self.A, self.B, self.M = other.to(device).A, other.B, other.M
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def show(self, **stages: Tensor | None) -> None:
        """Let the observer, if there is one, look at the stages that were just computed, and were
        not computed before.
        """
        if self.observer is not None and not is_recomputing():
            self.observer(stages)

    def code(self, attention: Tensor) -> Tensor:
        """z = A a: [..., D] -> [..., R], fp32 whatever the base computes in and whatever autocast a
        caller has on.
        """
        with torch.autocast(attention.device.type, enabled=False):
            z = nn.functional.linear(attention.to(self.A.dtype), self.A)
        return z if self.recode is None else self.recode(z)

    def weights_of(self, target: str) -> tuple[Tensor | None, Tensor | None]:
        """M and B of a target; None where the form has no such term, or does not modulate it."""
        return self.M.get(target), self.B.get(target)

    def apply_to(
        self, target: str, y: Tensor, z: Tensor, *, aside: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Modulate one product; a target that is not modulated comes back as it is.

        Args:
            target: gate, up or down.
            y: [..., O].
            z: [..., R], the codes of the same tokens.
            aside: with copies of the weights in their place, which gradients end in: for whoever
                only looks.

        Returns:
            y' like y; m and s [..., O] in fp32, None where the form has no such term.
        """
        if target not in self.config.targets:
            return y, None, None
        with torch.autocast(y.device.type, enabled=False):
            mult, add = self.weights_of(target)
            if aside:
                mult, add = (
                    None if weight is None else weight.detach().requires_grad_()
                    for weight in (mult, add)
                )
            return modulate(
                y,
                z,
                mult,
                add,
                self.config.mult_bound,
                self.config.additive_scale,
                self.config.mult_form,
            )

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"rank={c.rank}, targets={','.join(c.targets)}, modulation={c.modulation},"
            f" residual={c.residual}, mode={self.mode}"
        )
