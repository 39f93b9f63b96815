"""Files that cannot be a base: one line that names the file, the fault and what helps; nothing is
left.
"""

import errno
import struct
import sys

import numpy as np
import pytest
from gguf_files import Type, made_model, write_gguf

import npt
from npt.base.gguf import file as reading
from npt.base.source import load_tokenizer, read_config
from npt.errors import ConfigError, ModelError


def refused(name, words: str, kind: type[Exception] = ModelError) -> None:
    with pytest.raises(kind) as met:
        npt.load_base(str(name))
    assert words in str(met.value) and "\n" not in str(met.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"metadata": {"general.architecture": "gemma3"}}, "architecture 'gemma3'; from GGUF"),
        ({"metadata": {"general.type": "adapter"}}, "is not a little-endian model"),
        ({"metadata": {"split.count": 3}}, "is one of 3 parts; join them with llama-gguf-split"),
        ({"metadata": {"llama.expert_count": 8}}, "has expert_count 8; NPT supports only 0"),
        ({"metadata": {"llama.attention.sliding_window": 64}}, "llama.attention.sliding_window"),
        (
            {"metadata": {"llama.rope.dimension_count": 8}},
            "has rope.dimension_count 8; NPT supports only 16",
        ),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "'longrope'; NPT supports linear"),
        ({"metadata": {"llama.block_count": "two"}}, "has a str in llama.block_count"),
        (
            {"metadata": {"llama.feed_forward_length": 64}},
            "of shape [96, 64], but its metadata say [64, 64]",
        ),
        ({"metadata": {"llama.block_count": 3}}, "lacks the tensor blk.2."),
        ({"leave_out": ("llama.context_length",)}, "lacks the entry llama.context_length"),
        ({"leave_out": ("blk.1.ffn_up.weight",)}, "lacks the tensor blk.1.ffn_up.weight"),
        ({"leave_out": ("token_embd.weight",)}, "lacks the tensor token_embd.weight"),
        ({"tensors": {"blk.0.attn_v.bias": np.ones(32, np.float32)}}, "tensor blk.0.attn_v.bias"),
        ({"tensors": {"rope_freqs.weight": np.arange(1.0, 9.0, dtype=np.float32)}}, "not Llama 3"),
        ({"tokenizer": False}, "tokenizer of the kind 'none'"),
        ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, "tokenizer of the kind 'rwkv'"),
        ({"metadata": {"tokenizer.ggml.merges": ["qq zz"]}}, "a damaged tokenizer ("),
        ({"metadata": {"tokenizer.ggml.bos_token_id": 9999}}, "a damaged tokenizer (list index"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a"] * 5}}, "has duplicate tokens"),
        (
            {"metadata": {"llama.block_count": 10**8}},
            "block_count 100,000,000, but 20 tensors; NPT",
        ),
        ({"metadata": {"llama.attention.head_count": 3}}, "is damaged (Class validation error for"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "key heads must divide query heads"),
        (
            {"metadata": {"llama.attention.layer_norm_rms_epsilon": np.nan}},
            "rms_norm_eps nan: expected a finite number",
        ),
        ({"metadata": {"llama.rope.freq_base": 0.0}}, "rope_theta 0.0: expected a number above 0"),
        ({"pre": "poro-chat"}, "by the unknown pattern 'poro-chat'; NPT supports gpt-2"),
    ],
)
def test_a_file_that_cannot_be_a_base_is_refused(how, words, tmp_path) -> None:
    refused(write_gguf(tmp_path / "a.gguf", **how), words)


def claiming(count: int, kind: int = 0) -> bytes:
    """Return a file of one entry, an array of so many elements of this kind, and nothing in it."""
    entry = struct.pack("<QcIIQ", 1, b"a", 9, kind, count)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry


@pytest.mark.parametrize(
    "content",
    [
        claiming(2**60),  # of bytes
        claiming(2**60, kind=8),  # of texts
        claiming(2**60, kind=9),  # of arrays
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),  # tensors
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),  # entries
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60),  # letters
    ],
)
def test_a_count_beyond_the_end_of_the_file_is_refused_at_once(tmp_path, content) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    refused(tmp_path / "a.gguf", f"bytes and has {len(content)}); download it again")


def test_a_file_of_more_entries_than_any_vocabulary_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "_MOST_READS", 1000)
    (tmp_path / "a.gguf").write_bytes(claiming(2000) + bytes(2000))
    refused(tmp_path / "a.gguf", "its metadata have more than 1,000 entries")


def test_metadata_that_are_not_utf8_are_refused(tmp_path) -> None:
    content = write_gguf(tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(content.replace(b"gpt2", b"\xff\xff\xff2"))
    refused(tmp_path / "a.gguf", "has tokenizer.ggml.model that is not UTF-8")


@pytest.mark.parametrize("name", ["sha256-0123", "A.GGUF"])
def test_a_file_without_the_suffix_is_known_by_its_first_bytes(tmp_path, name) -> None:
    """Ollama stores models as blobs named after their hash."""
    write_gguf(tmp_path / "a.gguf").rename(tmp_path / name)
    assert read_config(str(tmp_path / name)).num_hidden_layers == 2
    assert read_config(str(tmp_path)).num_hidden_layers == 2


def test_a_file_of_another_kind_is_refused(tmp_path) -> None:
    for content in (b"PK\x03\x04 and more", b""):
        (tmp_path / "a.gguf").write_bytes(content)
        refused(tmp_path / "a.gguf", "is damaged, not a GGUF file")
    (tmp_path / "model.bin").write_bytes(b"PK")
    refused(tmp_path / "model.bin", "has no config.json: pass a folder")
    refused(tmp_path / "absent.gguf", "there is no file")


def test_a_file_that_was_cut_anywhere_is_refused(tmp_path) -> None:
    whole = write_gguf(tmp_path / "a.gguf").read_bytes()
    for size in (4, 10, 30, 200, 5_000, 60_000, len(whole) // 2, len(whole) - 1000):
        (tmp_path / "b.gguf").write_bytes(whole[:size])
        refused(tmp_path / "b.gguf", "is damaged, not a GGUF file")


def test_a_vocabulary_alone_is_refused(tmp_path) -> None:
    from gguf_files import gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "a.gguf", "is not a little-endian model")


def test_a_folder_with_two_files_names_both(tmp_path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    refused(tmp_path, "holds 2 GGUF files, among them a.gguf and b.gguf: pass one")
    made_model().config.save_pretrained(tmp_path)  # a folder of transformers', with files by it
    assert read_config(str(tmp_path)).model_type == "llama"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(bad, tmp_path) -> None:
    model = made_model()
    model.model.layers[1].mlp.up_proj.weight.data[2, 3] = bad
    file = write_gguf(tmp_path / "a.gguf", model, Type.F16)
    refused(file, "holds values in blk.1.ffn_up.weight that are not finite in")


def test_no_room_is_one_line_and_nothing_is_left(tmp_path, monkeypatch) -> None:
    file = write_gguf(tmp_path / "a.gguf")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("npt.base.shards.save_file", full)
    refused(file, "No space left on device; free disk space")
    with pytest.raises(ModelError, match="No space left on device; free disk space"):
        npt.import_base(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_without_gguf_the_extra_is_named(tmp_path, monkeypatch) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for act in (npt.load_base, read_config, load_tokenizer):
        with pytest.raises(
            ConfigError, match=r"needs gguf, .*pip install '\.\[gguf\]' in a clone of NPT$"
        ):
            act(str(file))


def test_a_folder_that_holds_something_is_not_written_to(tmp_path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="exists and is not empty; choose another"):
        npt.import_base(file, tmp_path)
    with pytest.raises(ModelError, match="there is no file"):
        npt.import_base(tmp_path / "b.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
