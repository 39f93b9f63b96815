"""Examples by optimizer: transformers' names that can run here, and torch's own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from clean_runs.parts import causal, llama
from clean_runs.watched import Build, Example

NAMES: dict[str, dict[str, Any]] = {
    "adamw_torch": {},
    "adamw_torch_fused": {},
    "adafactor": {},
    "adagrad": {},
    "ademamix": {},
    "ademamix_8bit": {},
    "adamw_8bit": {},
    "lion_32bit": {},
    "lion_8bit": {},
    "paged_adamw_32bit": {},
    "paged_lion_8bit": {},
    "rmsprop": {"optim_args": "momentum=0.5,centered=True"},
    "rmsprop_bnb": {},
    "rmsprop_bnb_8bit": {},
    "sgd": {"optim_args": "momentum=0.9,nesterov=True"},
}
"""Names of `optim` and their other arguments."""

OWN: dict[str, tuple[type, dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
    "Adamax": (torch.optim.Adamax, {}),
    "AdamW": (torch.optim.AdamW, {"foreach": True, "maximize": True}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "Rprop": (torch.optim.Rprop, {}),
}
"""torch's optimizers, passed as a class."""

ACCUMULATED = {"gradient_accumulation_steps": 2, "max_steps": 4}


def given_by_class(folder: Path, kind: type, settings: dict[str, Any]) -> Any:
    """Return a Trainer that creates the optimizer."""
    return causal(
        folder, arguments=ACCUMULATED, optimizer_cls_and_kwargs=(kind, {"lr": 0.01, **settings})
    )


def over_a_part(folder: Path) -> Any:
    """Return a Trainer whose optimizer steps the matrices alone; it clips by the norm of all."""
    model = llama()
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    optimizer = torch.optim.Muon(matrices, lr=0.01)
    return causal(folder, model=model, arguments=ACCUMULATED, optimizers=(optimizer, None))


def in_two_groups(folder: Path) -> Any:
    """Return a Trainer with a passed optimizer and schedule, two rates and bf16 moments."""
    model = llama().to(torch.bfloat16)
    norms = [p for p in model.parameters() if p.ndim == 1]
    rest = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": rest, "lr": 0.01}, {"params": norms, "lr": 0.1}])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return causal(folder, model=model, arguments=ACCUMULATED, optimizers=(optimizer, schedule))


def by_optimizer() -> list[Example]:
    """Return the examples."""
    builds: dict[str, Build] = {
        name: partial(causal, arguments={"optim": name, **ACCUMULATED, **more})
        for name, more in NAMES.items()
    }
    for name, (kind, settings) in OWN.items():
        builds[name] = partial(given_by_class, kind=kind, settings=settings)
    builds["Muon-over-matrices"] = over_a_part
    builds["AdamW-in-two-groups"] = in_two_groups
    return [Example(name, "optimizers", build) for name, build in builds.items()]
