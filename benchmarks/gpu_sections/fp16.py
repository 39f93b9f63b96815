"""Section 5: fp16 losses with torch's GradScaler under a guard."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gpu_sections.runner import Bench, Findings, Section
from npt.guard import Guard

WINDOWS, MICRO_BATCHES = 40, 4
SCALE = 2.0**30
"""A scale at which every gradient of `Loop` overflows."""


class Loop:
    """A small model in fp16 autocast, a scaler that begins too high, and micro-batches."""

    def __init__(self, device: torch.device, scale: float = SCALE):
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 8)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=scale, growth_interval=1000)
        self.inputs = torch.randn(WINDOWS, MICRO_BATCHES, 32, 64).to(device)

    def loss(self, window: int, part: int) -> Tensor:
        inputs = self.inputs[window, part]
        with torch.autocast(self.device.type, torch.float16):
            output = self.model(inputs)
        return (output.float() - inputs[:, :8]).square().mean()

    def plain(self) -> list[bool]:
        """Train as torch's documentation does; return for each window whether it stepped."""
        steps = []
        for window in range(WINDOWS):
            for part in range(MICRO_BATCHES):
                self.scaler.scale(self.loss(window, part) / MICRO_BATCHES).backward()
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            steps.append(self.scaler.get_scale() >= scale)
        return steps

    def guarded(self) -> tuple[list[bool], list[tuple[int, int | None]]]:
        """Train under a guard; return whether each window stepped, and the refusals."""
        guard = Guard(self.model, self.optimizer, scaler=self.scaler, loss="mean")
        steps, refused = [], []
        for window in range(WINDOWS):
            for part in range(MICRO_BATCHES):
                with guard.micro_batch() as micro:
                    micro.loss = loss = self.loss(window, part)
                    self.scaler.scale(loss).backward()
            outcome = guard.step()
            steps.append(outcome.applied)
            refused += [(window, refusal.micro_batch) for refusal in outcome.refused]
        return steps, refused

    def mean_loss(self) -> float:
        with torch.no_grad():
            return float(torch.stack([self.loss(0, part) for part in range(MICRO_BATCHES)]).mean())


def check_fp16(bench: Bench, findings: Findings) -> None:
    """Check that a scale far too high comes down as it does without a guard, and that a later bad
    micro-batch changes nothing.
    """
    # the plain loop divides each loss by MICRO_BATCHES, so its scale is that much larger
    plain = Loop(bench.device, MICRO_BATCHES * SCALE)
    guarded, poisoned = Loop(bench.device), Loop(bench.device)
    expected = plain.plain()
    steps, refused = guarded.guarded()
    missing = expected.index(True)
    findings.check("windows overflow", 2 <= missing < WINDOWS // 2, f"the first {missing}")
    # if some micro-batches of a window overflow, the guard keeps the others
    findings.check(
        "steps exactly where the plain loop steps",
        all(step >= plain_step for step, plain_step in zip(steps, expected, strict=True)),
        f"{sum(steps)}, the plain loop {sum(expected)}",
    )
    scales = guarded.scaler.get_scale(), plain.scaler.get_scale() / MICRO_BATCHES
    findings.check(
        "same scale as the plain loop",
        scales[1] <= scales[0] <= 2 * scales[1],
        f"{scales[0]:g}, without a guard {scales[1]:g}",
    )
    losses = guarded.mean_loss(), plain.mean_loss()
    findings.check("loss falls", losses[0] < 0.9 * Loop(bench.device).mean_loss())
    findings.below("loss against the plain loop", abs(losses[0] / losses[1] - 1), 0.1)
    bad = (WINDOWS - 2, 1)
    poisoned.inputs[bad][0, 0] = math.nan
    steps_with, refused_with = poisoned.guarded()
    findings.check(
        "only the bad micro-batch is refused",
        set(refused_with) - set(refused) == {bad} and steps_with == steps,
        f"refused {sorted(set(refused_with) - set(refused))}",
    )
    findings.check(
        "the refusal does not change the scale", poisoned.scaler.get_scale() == scales[0]
    )
    findings.figures |= {"windows without a step": missing, "scale": scales[0], "losses": losses}
    findings.notes.append(f"loss scale from {SCALE:g} to {scales[0]:g} in {missing} windows")


FP16 = Section(5, "fp16 with a guarded GradScaler", check_fp16)
