"""Small tokenizers of the kinds that put a space before a text: as SentencePiece models are
converted, and byte-level ones.
"""

import json
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaTokenizer, PreTrainedTokenizerFast

from random_base import random_base

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
BOS, EOS = 1, 2

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_TEXT = [
    "The capital of France is Paris, and the capital of Spain is Madrid.",
    "Question: what is the answer to the question? Answer: the answer is 42, or four and two.",
    "def answer(question):\n    return question + 1\n",
    "import os\nimport sys\n\nprint(os.path, sys.path)\n",
    "user: hello there. assistant: hello, how are you? user: I am well, thank you very much.",
    "  two spaces,   three spaces,    four spaces. [INST] an instruction [/INST] an answer.",
] * 4


def _trained(model: Any, pre_tokenizer: Any, trainer: Any) -> dict[str, Any]:
    """Vocabulary and merges of a model that is trained on a few lines."""
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizer
    made.train_from_iterator(_TEXT, trainer)
    return json.loads(made.to_str())["model"]


@cache
def _bpe() -> tuple[Any, list[tuple[str, str]]]:
    """Vocabulary and merges, by pieces of words that a space begins."""
    settings = {"vocab_size": 520, "special_tokens": SPECIAL + _BYTES, "show_progress": False}
    model = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = _trained(model, pre_tokenizers.Metaspace(), BpeTrainer(**settings))
    return made["vocab"], [(left, right) for left, right in made["merges"]]


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
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    made.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    return made


def _with_bytes(strip: bool, **space: Any) -> Any:
    """A tokenizer whose unknown characters are bytes. space: what makes a space a piece."""
    model = models.BPE(*_bpe(), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if strip else []
    return _of(model, decoder=decoders.Sequence(steps), **space)


def _metaspace_bpe(scheme: str) -> Any:
    space = pre_tokenizers.Metaspace("▁", scheme)
    return _with_bytes(scheme != "never", pre_tokenizer=space)


def _llama_2() -> Any:
    """As transformers 4 converted Llama 2 and Mistral 0.1: the space comes with normalisation, and
    there is no pre-tokenizer.
    """
    space = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _with_bytes(True, normalizer=normalizers.Sequence(space))


def _llama_class(legacy: bool) -> Any:
    vocab, merges = _bpe()
    return LlamaTokenizer(vocab=vocab, merges=merges, legacy=legacy)


def _byte_level(prefix: bool) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    settings = {"vocab_size": 500, "special_tokens": SPECIAL, "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = _trained(models.BPE(), level, BpeTrainer(**settings, initial_alphabet=alphabet))
    merges = [(left, right) for left, right in made["merges"]]
    model = models.BPE(made["vocab"], merges)
    return _of(model, pre_tokenizer=level, decoder=decoders.ByteLevel())


PREFIXING = {
    "metaspace, always": lambda: _metaspace_bpe("always"),
    "metaspace, first": lambda: _metaspace_bpe("first"),
    "llama 2": _llama_2,
    "llama class, legacy": lambda: _llama_class(True),
    "llama class": lambda: _llama_class(False),
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
    size = {"hidden_size": 32, "intermediate_size": 64}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    model = random_base(LlamaConfig(vocab_size=len(tokenizer), **size), device="cpu")
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    spaced = [i for i, piece in enumerate(pieces) if piece[0] in "▁Ġ" and len(piece) > 3]
    with torch.no_grad():
        head = model.lm_head.weight
        rows = torch.randn(len(spaced), head.shape[1], generator=torch.Generator().manual_seed(1))
        head.zero_()[spaced] = rows.to(head.dtype)
    return model
