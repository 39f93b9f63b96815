"""Greedy continuation of several prompts at once, with a cache of keys and values.

Prompts are padded on the left, so that the tokens of a row, and what is added to them, are
neighbours: a window counts columns, and padding behind a prompt would use up some. Padding sees
itself and nothing else, as a document of its own in a packed row does: a query without a key is one
that some attention kernels answer with NaN. Which tokens come out does not depend on the batch they
are in, but for ties that rounding decides: rows of another width sum in another order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from npt.adapters.stream import MASKED, model_inputs
from npt.base.linear import cast_once
from npt.data.batch import Batch, batch_from_tensors
from npt.errors import NumericalError


@torch.no_grad()
def continue_greedily(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: Collection[int],
    names: Sequence[str],
) -> list[list[int]]:
    """The most likely token again and again, in the mode that the model's adapters are in.

    Memory: beside the cache, the fp32 form of a head that is stored in 16 bit, 4 V D bytes from the
    first token to the last.

    Args:
        model: in evaluation mode.
        prompts: B of them, none empty.
        limits: how many tokens to add to each, at most.
        ends: ids that end a row; they are part of it.
        names: of the prompts, for an error.

    Returns:
        The new tokens of each prompt.

    Raises:
        NumericalError: logits that are not finite, from which argmax would make a token all the
            same.
    """
    if not prompts:
        return []
    with cast_once(model.lm_head):
        return _continue(model, prompts, limits, ends, names)


def _continue(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: Collection[int],
    names: Sequence[str],
) -> list[list[int]]:
    """`continue_greedily` of at least one prompt."""
    device = next(model.parameters()).device
    batch = _padded(prompts)
    apart = batch.padded and model.config._attn_implementation in MASKED
    inputs = model_inputs(model, (_with_padding_apart(batch) if apart else batch).to(device))
    mask, positions = batch.attention_mask.to(device), inputs["position_ids"]
    open_rows = {row for row, limit in enumerate(limits) if limit > 0}
    added: list[list[int]] = [[] for _ in prompts]
    cache = None
    while open_rows:
        out = model.model(**inputs, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = model.lm_head(out.last_hidden_state[:, -1].to(device)).to(device)
        ids = logits.argmax(dim=-1, keepdim=True)
        # One answer from the device for both: which token, and whether it is one.
        answers = torch.where(torch.isfinite(logits).all(dim=-1), ids[:, 0], -1).tolist()
        for row in sorted(open_rows):
            if answers[row] < 0:
                raise NumericalError(
                    f"the logits behind token {len(prompts[row]) + len(added[row])} of {names[row]}"
                    " are not finite; npt trace finds the operation"
                )
            added[row].append(answers[row])
            if answers[row] in ends or len(added[row]) == limits[row]:
                open_rows.discard(row)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        positions = positions[:, -1:] + 1
        # every query a token now, which has keys
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return added


def _padded(prompts: Sequence[Sequence[int]]) -> Batch:
    """The prompts in one batch, padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    # Padding repeats the row's first token: a broken embedding of the pad token is nobody's
    # business here.
    ids = [[*[prompt[0]] * (width - len(prompt)), *prompt] for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return batch_from_tensors(torch.tensor(ids), torch.tensor(mask))


def _with_padding_apart(batch: Batch) -> Batch:
    """The same with its padding for a document of its own: no key of any other, and never without
    one.
    """
    every = torch.ones_like(batch.attention_mask)
    return replace(
        batch_from_tensors(batch.input_ids, every),
        documents=batch.attention_mask,
        position_ids=batch.position_ids,
    )


def end_ids(model: PreTrainedModel, tokenizer: object) -> frozenset[int]:
    """The ids that end a text: the tokenizer's, and those of the model's generation settings, which
    know more.
    """
    found: list[object] = [getattr(tokenizer, "eos_token_id", None)]
    further = getattr(model.generation_config, "eos_token_id", None)
    found += further if isinstance(further, list | tuple) else [further]
    return frozenset(i for i in found if isinstance(i, int))
