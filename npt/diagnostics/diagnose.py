"""Name the first bad number after a refused micro-batch: in the adapters, the base or the logits.

Run after a refusal only, so a clean step pays nothing for it. It reads the state as it is now,
which the guarded step has kept clean: a fault of the state is found here, one of the data shows in
the logits, and a transient one in neither.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.adapters.stream import model_inputs
from npt.data.batch import Batch
from npt.diagnostics.guards import Finding, base_fault, logits_fault, target_fault, tensor_fault
from npt.random_state import kept_random_state


@kept_random_state()
def diagnose(model: PreTrainedModel, batch: Batch) -> Finding | None:
    """Return the first finding: adapters, base, labels, then teacher's and student's logits. The
    model stays as it is.
    """
    finding = (
        tensor_fault(adapter_parameters(model))
        or base_fault(model)
        or target_fault(batch.labels, model.config.vocab_size, name="label")
    )
    if finding is not None:
        return finding
    batch = batch.to(next(model.parameters()).device)
    plain = torch.autocast(batch.input_ids.device.type, enabled=False)
    for mode in ("teacher", "student"):
        with torch.no_grad(), adapter_mode(model, mode), plain:
            logits = model(**model_inputs(model, batch), use_cache=False).logits
        # Logits of padding are nobody's business.
        logits = torch.where(batch.attention_mask.unsqueeze(-1).bool(), logits, 0.0)
        finding = logits_fault(logits, f"{mode} logits")
        if finding is not None:
            return finding
    return None
