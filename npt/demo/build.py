"""Build the embedded model: `python -m npt.demo.build --output FOLDER`.

The model is a Llama with about 3.5 M parameters (grouped-query attention, tied embeddings) and a
byte-level BPE tokenizer. Both are trained on the `train` split of the built-in text
(`npt.data.readers`), the model with next-token cross entropy. It is small enough for the package
and good enough to test distillation, quantisation and perplexity.

`build.json` records bits per byte on the held-out files, for the model and for gzip. Training is
seeded, but its bits differ between machines and torch versions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import platform
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from npt.console import put
from npt.data.readers import builtin_files

VOCAB = 2048
CONTEXT = 512
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if not loop.first and loop.previtem.role != 'assistant' %}{{ '\\n' }}{% endif %}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
"""The messages' texts, a line each, and an end token after each answer: a model of code has seen no
conversation, and a single message as a prompt must remain what it is."""

SAMPLE_PROMPT = "class Stack:\n    def __init__(self, items"


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with VOCAB entries; it puts `<s>` before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in builtin_files("train")), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=2 * CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2 * CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, split: str) -> torch.Tensor:
    """Return the tokens of all files of a split, each as `<s> ... </s>`: [N] int64."""
    texts = [text for _, text in builtin_files(split)]
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    return torch.tensor([token for ids in encoded for token in [*ids, eos]], dtype=torch.int64)


def train(
    model: LlamaForCausalLM, stream: torch.Tensor, steps: int, batch: int, peak_lr: float, seed: int
) -> None:
    """Train with AdamW, warm-up, cosine decay to a tenth, clipping at 1.0 and bf16 autocast, on
    non-overlapping windows with another offset in each epoch.
    """
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=peak_lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    generator = torch.Generator().manual_seed(seed)
    warmup = max(1, steps // 20)
    starts: list[int] = []
    started = time.perf_counter()
    running = None
    for step in range(steps):
        if len(starts) < batch:
            shift = int(torch.randint(CONTEXT, (1,), generator=generator))
            windows = (len(stream) - shift - 1) // CONTEXT
            starts = [
                shift + CONTEXT * int(i) for i in torch.randperm(windows, generator=generator)
            ]
        rows = [starts.pop() for _ in range(batch)]
        ids_BT = torch.stack([stream[s : s + CONTEXT] for s in rows])
        labels_BT = torch.stack([stream[s + 1 : s + CONTEXT + 1] for s in rows])
        progress = (
            (step + 1) / warmup if step < warmup else (step - warmup) / max(1, steps - warmup)
        )
        scale = progress if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if step % 25 == 0 or step + 1 == steps:
            rate = (step + 1) * batch * CONTEXT / (time.perf_counter() - started)
            put(f"step {step + 1}/{steps}  loss {running:.4f} nats/token  {rate:,.0f} tokens/s")


@torch.no_grad()
def bits_per_byte(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stride: int = CONTEXT // 2
) -> dict:
    """Return held-out bits per byte, for the model and for gzip -9. Each file is scored alone in
    windows of CONTEXT, each token once, with the longest context in its window."""
    nats = 0.0
    n_bytes = n_tokens = gzip_bytes = 0
    for _, text in builtin_files("heldout"):
        raw = text.encode("utf-8")
        n_bytes += len(raw)
        gzip_bytes += len(gzip.compress(raw, 9))
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        n_tokens += len(ids) - 1
        scored = 0
        for start in range(0, max(1, len(ids) - 1), stride):
            window = ids[start : start + CONTEXT]
            logits = model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
            losses = F.cross_entropy(logits, window[1:], reduction="none")
            fresh = start + len(window) - 1 - scored
            nats += float(losses[len(losses) - fresh :].sum(dtype=torch.float64))
            scored += fresh
            if start + CONTEXT >= len(ids):
                break
    return {
        "heldout_bytes": n_bytes,
        "heldout_tokens": n_tokens,
        "nats_per_token": nats / n_tokens,
        "bits_per_byte": nats / math.log(2) / n_bytes,
        "gzip_bits_per_byte": 8 * gzip_bytes / n_bytes,
    }


def sample_text(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return SAMPLE_PROMPT and 90 sampled tokens: temperature 0.7, top-p 0.95, seed 0."""
    torch.manual_seed(0)
    prompt = tokenizer(SAMPLE_PROMPT, return_tensors="pt")
    tokens = model.generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=90,
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
    )
    return tokenizer.decode(tokens[0], skip_special_tokens=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to write the model and tokenizer to"
    )
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument(
        "--batch", type=int, default=8, help=f"windows of {CONTEXT} tokens per step"
    )
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer()
    stream = token_stream(tokenizer, "train")
    model = LlamaForCausalLM(model_config(tokenizer))
    parameters = sum(p.numel() for p in model.parameters())
    put(
        f"{parameters:,} parameters, {len(stream):,} training tokens,"
        f" training on {args.steps * args.batch * CONTEXT:,}"
    )
    started = time.perf_counter()
    train(model, stream, args.steps, args.batch, args.learning_rate, args.seed)
    minutes = (time.perf_counter() - started) / 60

    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    # measured as it will be loaded
    model = LlamaForCausalLM.from_pretrained(args.output, dtype=torch.float32).eval()
    figures = bits_per_byte(model, tokenizer)
    record = {
        "parameters": parameters,
        "training_tokens_seen": args.steps * args.batch * CONTEXT,
        "steps": args.steps,
        "seed": args.seed,
        "minutes": round(minutes, 1),
        **{k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()},
        "sample": sample_text(model, tokenizer),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (args.output / "build.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    put(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
