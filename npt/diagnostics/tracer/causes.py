"""The causes of bad numbers, and the remedy that fits each."""

from __future__ import annotations

import re

_TABLE = """
corrupt weight: load the weights again from a checkpoint in which they are sound, or go back to
    the last adapter that loads, and look for the step or the code that wrote the number
corrupt absmax: a statistic of a 4-bit weight is bad: quantise the base again from its checkpoint
    and check the file's checksum
corrupt input: look at how the batch is made: features, tokenising, truncation and padding may
    give no non-finite or huge numbers
token id: check that the data was tokenised with the model's own tokenizer, and that the padding
    id lies in the vocabulary
no valid label: a mean over no label divides by nothing: truncate the prompt, not the completion,
    or leave the sample out
masked label: the loss asks for a class whose logit is masked with -Inf: do not mask classes that
    occur as labels, or ignore those
cast overflow: the number does not fit the smaller dtype: compute in fp32, as --use_quantization
    does (drop --use_fp16), or in bf16
low-precision overflow: the result fits fp32 and not this dtype: compute in fp32 or bf16 (drop
    --use_fp16, autocast); of gradients, lower the loss scale
vanishing norm: a norm or variance is 0: check the epsilon (rms_norm_eps), and add it under the
    root, not after it
division by zero: a count, norm or probability is 0: clamp the divisor, or leave such elements out
    with torch.where before it
fully masked row: a query has no key: let every row of the mask see one, its own position at
    least, and zero padded queries
exponential overflow: the logits are too large: subtract their maximum, as softmax and logsumexp
    do, or scale them down
invalid argument: the function has no value there: clamp its argument (log of 0, root of a
    negative number)
infinite slope: the derivative has no finite value there: keep the argument from the edge (sqrt(x
    + eps), clamp before log)
masked gradient: torch.where hides a bad branch in forward only: make the argument safe before the
    where as well
masked arithmetic: -Inf as a mask was used in arithmetic: mask with torch.where or finfo.min, do
    not add or multiply -Inf
impossible alignment: a target of the CTC loss is longer than its input's steps can spell (a
    repeated label needs a blank between): leave such samples out, lengthen the input, or pass
    zero_infinity=True
exploding product: activations have grown too large: look at where they grew; lower the learning
    rate (--learning_rate) or the scale of what is added (--additive_scale), raise
    --regularization_lambda, start with --safe_mode, watch the residual stream with --trace_steps
exploding gradient: gradients have grown too large: lower --learning_rate, raise
    --regularization_lambda, or start with --safe_mode
written constant: code wrote a non-finite constant here: look at the line, a hook or an assignment
beyond the limit: nothing is broken yet: look at what went in, and at what the numbers become
    further on
not repeatable: the fault did not recur with the same batch, state and random numbers: suspect
    hardware, a race, a compiled or non-deterministic kernel (torch.use_deterministic_algorithms),
    or a run that does not do the same each time
outside of torch: no torch operation of the pass made the number: look at tensors made before it
    (targets, a closure, a cache), at numpy code, at memory from torch.empty and at compiled
    extensions
unknown: no rule knows this one: look at the line and at what went in
"""

_ENTRIES = re.split(r"\n(?=\w)", _TABLE.strip())

CAUSES = {cause: " ".join(remedy.split()) for cause, remedy in (e.split(": ", 1) for e in _ENTRIES)}
"""Every cause, and its remedy."""
