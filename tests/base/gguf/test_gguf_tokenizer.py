"""Tokenizers of GGUF files, compared with those that they were written from."""

import pytest
from gguf_files import TEMPLATE, made_model, vocabulary, write_gguf
from sentencepieces import BOS, PREFIXING

from npt.base.gguf.file import GGUFFile
from npt.base.gguf.tokenizer import end_ids, tokenizer_of
from npt.base.source import load_tokenizer

TEXTS = (
    "The quick brown fox, 2024:  two spaces before 17 and one at its end ",
    "def f(x):\n    return x + 1\n\n\n# naïve café, 漢字, 🙂\t!",
    " begins with a space",
    "<s>control tokens</s> inside",
    "",
)


def read(path, **how):
    return tokenizer_of(GGUFFile(write_gguf(path, made_model(vocab_size=2048), **how)))


def pieces(tokenizer, text: str) -> list[str]:
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [piece.replace("Ġ", " ") for piece, _ in split]


def test_a_byte_level_tokenizer_is_the_one_that_was_written(tmp_path) -> None:
    own, found = load_tokenizer(), read(tmp_path / "a.gguf")
    for text in TEXTS:
        assert found(text).input_ids == own(text).input_ids
        assert found.decode(found(text).input_ids) == own.decode(own(text).input_ids)
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<s>", "</s>", "<pad>")
    assert found.chat_template == TEMPLATE


def test_a_saved_tokenizer_cuts_text_as_before(tmp_path) -> None:
    found = read(tmp_path / "a.gguf", pre="llama-bpe")
    found.save_pretrained(tmp_path / "saved")
    made_model().config.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    for text in TEXTS:
        assert again(text).input_ids == found(text).input_ids
    assert again.chat_template == TEMPLATE


def test_sentencepieces_are_cut_as_transformers_cuts_them(tmp_path) -> None:
    own = PREFIXING["llama 2"]()
    ids = own.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|user|>": 3, "<|assistant|>": 3}
    found = read(
        tmp_path / "a.gguf",
        metadata={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            # a trainer's merges come in the order of their tokens
            "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
            "tokenizer.ggml.token_type": [
                kinds.get(t, 6 if t.startswith("<0x") else 1) for t in tokens
            ],
            "tokenizer.ggml.bos_token_id": BOS,
            "tokenizer.ggml.unknown_token_id": 0,
        },
        leave_out=("tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token"),
    )
    for text in (*TEXTS, "<|user|>hello there<|assistant|>I am well"):
        assert found(text).input_ids == own(text).input_ids, text
        kept = found.decode(found(text).input_ids, skip_special_tokens=True)
        assert kept == own.decode(own(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("gpt-2", "a  17", ["a", " ", " 17"]),
        ("smollm", "a  17", ["a", "  ", "1", "7"]),
        ("llama-bpe", "IT'S 12345", ["IT", "'S", " ", "123", "45"]),
        ("qwen2", "IT'S 12", ["IT", "'S", " ", "1", "2"]),
        ("tekken", "aBc 12", ["a", "Bc", " ", "1", "2"]),
    ],
)
def test_text_is_split_by_the_pattern_that_is_named(pre, text, wanted, tmp_path) -> None:
    assert pieces(read(tmp_path / "a.gguf", pre=pre), text) == wanted


def test_a_piece_in_the_vocabulary_needs_no_merges_in_llama_3(tmp_path) -> None:
    """Its tokenizer takes such a piece as it is."""
    token = vocabulary(2048)["tokens"].index("the")
    merges = {"tokenizer.ggml.merges": [vocabulary(2048)["merges"][0]]}
    for pre, wanted in (("llama-bpe", True), ("gpt-2", False)):
        found = read(tmp_path / f"{pre}.gguf", pre=pre, metadata=merges)
        assert (found("the").input_ids == [0, token]) == wanted


def test_qwen_joins_accents_with_their_letters(tmp_path) -> None:
    found = read(tmp_path / "a.gguf", pre="qwen2")
    assert found("cafe\u0301").input_ids == found("caf\u00e9").input_ids


def test_bos_is_added_as_the_file_or_its_kind_says(tmp_path) -> None:
    key = "tokenizer.ggml.add_bos_token"
    for pre, said, wanted in (
        ("gpt-2", False, False),
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ):
        found = read(
            tmp_path / "a.gguf",
            pre=pre,
            metadata={} if said is None else {key: said},
            leave_out=(key,) if said is None else (),
        )
        assert (found("a").input_ids[0] == found.bos_token_id) == wanted
    both = read(tmp_path / "a.gguf", metadata={"tokenizer.ggml.add_eos_token": True})
    assert both("a").input_ids[-1] == both.eos_token_id


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_both_texts_of_a_pair_get_the_tokens_that_the_file_adds(bos, eos, tmp_path) -> None:
    added = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    found = read(tmp_path / "a.gguf", metadata=added)
    start = [found.bos_token_id] if bos else []
    end = [found.eos_token_id] if eos else []

    def whole(text: str) -> list[int]:
        return [*start, *found(text, add_special_tokens=False).input_ids, *end]

    assert found("one").input_ids == whole("one")
    pair = found("one", "and two", return_token_type_ids=True)
    assert pair.input_ids == whole("one") + whole("and two")
    assert pair.token_type_ids == [0] * len(whole("one")) + [1] * len(whole("and two"))


def test_a_token_that_the_file_lacks_is_not_added(tmp_path) -> None:
    found = read(
        tmp_path / "a.gguf",
        metadata={"tokenizer.ggml.add_eos_token": True},
        leave_out=("tokenizer.ggml.eos_token_id",),
    )
    assert found("one").input_ids == read(tmp_path / "b.gguf")("one").input_ids


def test_a_turn_ends_an_answer_too(tmp_path) -> None:
    file = write_gguf(tmp_path / "a.gguf", metadata={"tokenizer.ggml.eot_token_id": 2})
    assert end_ids(GGUFFile(file)) == [1, 2]
