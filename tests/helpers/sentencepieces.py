"""Small tokenizers of the kinds that put a space before a text: as SentencePiece models are
converted, and byte-level ones.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import LlamaConfig, LlamaTokenizer, PreTrainedTokenizerFast

from npt.base.random_base import random_base

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
UNK, BOS, EOS = 0, 1, 2

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_TEXT = [
    "The capital of France is Paris, and the capital of Spain is Madrid.",
    "Question: what is the answer to the question? Answer: the answer is 42, or four and two.",
    "def answer(question):\n    return question + 1\n",
    "import os\nimport sys\n\nprint(os.path, sys.path)\n",
    "user: hello there. assistant: hello, how are you? user: I am well, thank you very much.",
    "  two spaces,   three spaces,    four spaces. [INST] an instruction [/INST] an answer.",
] * 4


@cache
def _bpe() -> dict[str, Any]:
    """Vocabulary and merges, by pieces of words that a space begins."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(vocab_size=520, special_tokens=SPECIAL + _BYTES, show_progress=False),
    )
    return json.loads(made.to_str())["model"]


def _merges() -> list[tuple[str, str]]:
    return [(left, right) for left, right in _bpe()["merges"]]


def _of(model: Any, *, normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any) -> Any:
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    return made


def _metaspace_bpe(scheme: str, split: bool = True) -> Any:
    model = models.BPE(
        _bpe()["vocab"], _merges(), unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    space = pre_tokenizers.Metaspace("▁", scheme, split)
    return _of(model, pre_tokenizer=space, decoder=decoders.Sequence(steps))


def _llama_2() -> Any:
    """As transformers 4 converted Llama 2 and Mistral 0.1: the space comes with normalisation, and
    there is no pre-tokenizer.
    """
    model = models.BPE(
        _bpe()["vocab"], _merges(), unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    space = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _of(model, normalizer=space, decoder=decoders.Sequence(steps))


def _llama_class(legacy: bool) -> Any:
    return LlamaTokenizer(vocab=_bpe()["vocab"], merges=_merges(), legacy=legacy)


def _unigram(scheme: str) -> Any:
    trained = Tokenizer(models.Unigram())
    space = pre_tokenizers.Metaspace("▁", scheme)
    trained.pre_tokenizer = space
    trained.train_from_iterator(
        _TEXT,
        trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    pieces = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"]]
    return _of(
        models.Unigram(pieces, unk_id=UNK, byte_fallback=False),
        pre_tokenizer=space,
        decoder=decoders.Metaspace("▁", scheme),
    )


def _byte_level(prefix: bool) -> Any:
    trained = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    trained.pre_tokenizer = level
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        _TEXT,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in model["merges"]]
    return _of(
        models.BPE(model["vocab"], merges), pre_tokenizer=level, decoder=decoders.ByteLevel()
    )


PREFIXING = {
    "metaspace, always": lambda: _metaspace_bpe("always"),
    "metaspace, first": lambda: _metaspace_bpe("first"),
    "metaspace, first, unsplit": lambda: _metaspace_bpe("first", False),
    "llama 2": _llama_2,
    "llama class, legacy": lambda: _llama_class(True),
    "llama class": lambda: _llama_class(False),
    "unigram, always": lambda: _unigram("always"),
    "unigram, first": lambda: _unigram("first"),
    "byte level with a space": lambda: _byte_level(True),
}
"""By kind, those that begin every text with a space of their own."""

PLAIN = {
    "metaspace, never": lambda: _metaspace_bpe("never"),
    "byte level": lambda: _byte_level(False),
}


@cache
def tokenizer_of(kind: str) -> Any:
    return (PREFIXING | PLAIN)[kind]()


def speaker_of(kind: str) -> Any:
    """A random model in 4 bit that writes words which begin with a space, and nothing else."""
    tokenizer = tokenizer_of(kind)
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = random_base(LlamaConfig(vocab_size=len(tokenizer), **size), device="cpu")
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    spaced = [i for i, piece in enumerate(pieces) if piece[0] in "▁Ġ" and len(piece) > 3]
    with torch.no_grad():
        head = model.lm_head.weight
        rows = torch.randn(len(spaced), head.shape[1], generator=torch.Generator().manual_seed(1))
        head.zero_()[spaced] = rows.to(head.dtype)
    return model
