"""The bundle written when training stops for numerical reasons: the state it stopped in and what it stopped on.

safetensors and JSON only, written as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from npt.adapters.attach import adapter_parameters
from npt.data.batch import Batch
from npt.distill.transaction import Refusal, Trace
from npt.files import new_folder, write_json


def write_postmortem(
    run: Path,
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    window: Sequence[Batch],
    refusals: Sequence[Refusal],
    step: int,
    history: Iterable[Trace] = (),
) -> Path:
    """Write `postmortem/step-XXXXXXXX` below the run folder.

    Args:
        run: the run folder.
        model: whose adapters are saved as they are.
        optimizer: whose moments are saved.
        window: the micro-batches of the window that ended the run.
        refusals: of that window.
        step: applied steps before it.
        history: losses and gradient norms of the last micro-batches, with their samples.

    Returns:
        The bundle's folder: `state.safetensors` (adapters, moments, random state), `window.safetensors`, `postmortem.json`.
    """
    folder = run / "postmortem" / f"step-{step:08d}"
    state: dict[str, torch.Tensor] = {"rng.cpu": torch.get_rng_state()}
    for name, parameter in adapter_parameters(model).items():
        state[f"adapter.{name}"] = parameter.detach().cpu().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"optimizer.{name}.{key}"] = value.detach().cpu().clone()
    batches = {
        f"{index}.{name}": getattr(batch, name).cpu().clone()
        for index, batch in enumerate(window)
        for name in ("input_ids", "attention_mask")
    }
    with new_folder(folder) as temporary:
        save_file(state, temporary / "state.safetensors")
        save_file(batches, temporary / "window.safetensors")
        write_json(
            temporary / "postmortem.json",
            {
                "step": step,
                "refusals": [asdict(r) for r in refusals],
                "sample_ids": [list(b.sample_ids) for b in window],
                "history": [asdict(trace) for trace in history],
            },
        )
    return folder
