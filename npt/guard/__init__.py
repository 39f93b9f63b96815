"""A guard for any training loop: a micro-batch that yields NaN or Inf changes nothing in the run.

    guard = npt.guard.Guard(model, optimizer, max_grad_norm=1.0, scheduler=scheduler, loss="mean")
    for window in windows:
        for batch in window:
            with guard.micro_batch(tokens=batch.tokens, ids=batch.ids) as micro:
                micro.loss = loss = model(**batch.inputs).loss
                loss.backward()
        outcome = guard.step()

NPT's own trainer takes the same step. The guard itself needs only torch; the parts
for a Trainer or a post-mortem are imported when first used.
"""

from npt.extras import PublicNames
from npt.guard.guard import Guard as Guard  # at once, as every loop needs it

_NAMES = PublicNames(__name__, __file__)

__all__ = sorted(_NAMES.homes)
__getattr__ = _NAMES.read
__dir__ = _NAMES.listed
