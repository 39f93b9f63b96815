"""Build a fast tokenizer from the vocabulary, merges and template in a GGUF file.

A file only names the pattern that splits a text before merges apply (`tokenizer.ggml.pre`).
transformers' reader ignores the name or knows different names in different versions, so text would
silently be split unlike in training. Here the patterns are taken from the models' own tokenizers,
and an unknown name is refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from npt.base.gguf.file import GGUFFile
from npt.errors import ModelError, first_line
from npt.stored import shown

# llama.cpp's types of tokens; for those matched literally, whether they are special
_NORMAL = 1
_SPELT = {2: True, 3: True, 4: False}  # unknown, control, defined by a user

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _pieces(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_])


_LLAMA3 = _pieces(_WORDS % r"\p{N}{1,3}"), {"whole", "bos"}
_SPLITTINGS: dict[str, tuple[Any, set[str]]] = {
    "gpt-2": (_GPT2, set()),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2]),
        set(),
    ),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": (_pieces(_WORDS % r"\p{N}"), {"composed"}),
    "deepseek-r1-qwen": (_pieces(_WORDS % r"\p{N}"), set()),
    "tekken": (_pieces(_CASES), {"whole", "bos"}),
}
"""By `tokenizer.ggml.pre`: how to split a text into pieces, and options. `whole`: a piece in the
vocabulary is a token, whatever the merges say. `composed`: first join accents and letters. `bos`: a
text begins with BOS unless the file says otherwise."""


def tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Return the tokenizer in a file, with its chat template."""
    kind = file.get("tokenizer.ggml.model", str, "none")
    if kind not in ("gpt2", "llama"):
        raise file.refusal(
            f"has a tokenizer of the kind {shown(kind)}; NPT supports gpt2 and llama. Load a folder"
            " of the model instead"
        )
    tokens = file.get("tokenizer.ggml.tokens", list)
    types = file.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    repeated = len(vocabulary) < len(tokens)
    if repeated or len(tokens) > file.tensors["token_embd.weight"].shape[-1]:
        raise file.refusal("has duplicate tokens or more tokens than embeddings; download it again")
    try:
        if kind == "gpt2":
            backend, bos = _byte_level(file, vocabulary)
        else:
            backend = _sentencepiece(file, vocabulary, types)
            bos = True
        # a text may spell these tokens, so they are found before it is split
        spelt = [
            AddedToken(token, normalized=False, special=_SPELT[type_])
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in _SPELT
        ]
        backend.add_tokens(spelt)
        special = {
            f"{name}_token": tokens[index]
            for name in ("bos", "eos", "unk", "pad")
            if (index := file.token_id(name)) is not None
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            clean_up_tokenization_spaces=False,
            chat_template=file.get("tokenizer.chat_template", str, "") or None,
            add_bos_token=file.get("tokenizer.ggml.add_bos_token", bool, bos),
            add_eos_token=file.get("tokenizer.ggml.add_eos_token", bool, False),
            **special,
        )
    except ModelError:
        raise
    except Exception as error:  # e.g. from Rust, if merges do not fit
        raise file.refusal(
            f"has a damaged tokenizer ({first_line(error)}); download it again"
        ) from error


def end_ids(file: GGUFFile) -> list[int]:
    """Return the ids of the tokens that end a text, a turn or a message."""
    ids = dict.fromkeys(map(file.token_id, ("eos", "eot", "eom")))
    return [index for index in ids if index is not None]


def _byte_level(file: GGUFFile, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Return a byte-level tokenizer, and whether its texts begin with BOS by default."""
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in _SPLITTINGS:
        raise file.refusal(
            f"splits text by the unknown pattern {shown(name)}; NPT supports"
            f" {', '.join(_SPLITTINGS)}. Load a folder of the model instead"
        )
    pre_tokenizer, ways = _SPLITTINGS[name]
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", list)]
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges="whole" in ways))
    if "composed" in ways:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend, "bos" in ways


def _sentencepiece(file: GGUFFile, vocabulary: dict[str, int], types: list[int]) -> Tokenizer:
    """Return a tokenizer like transformers' for SentencePiece models."""
    scores = file.get("tokenizer.ggml.scores", list)
    pieces = {
        piece: score
        for piece, type_, score in zip(vocabulary, types, scores, strict=True)
        if type_ == _NORMAL
    }
    merges = generate_merges(vocabulary, pieces)
    unknown = list(vocabulary)[file.get("tokenizer.ggml.unknown_token_id", int)]
    model = models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    backend = Tokenizer(model)
    normal: list[Any] = [normalizers.Replace(" ", "▁")]
    decode: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        normal.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(normal)
    backend.decoder = decoders.Sequence(decode)
    return backend
