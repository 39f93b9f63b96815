"""Shared fixtures: a random Llama small enough for exhaustive checks, 4-bit on the CPU as the
normal case.
"""

import gc
import itertools
import os
import shutil
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
# One thread: products this small gain nothing from a second one, and two processes with two threads
# each wait for one another. And tests fork processes that compute: those of a process with a second
# thread of OpenMP would wait for it for ever.
os.environ["OMP_NUM_THREADS"] = "1"
# Read by npt.device, in processes that tests start as well.
os.environ["NPT_DEVICE"] = "cpu"

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tiers import listed, slow

# torch and transformers are imported by their users: the process that hands tests to workers
# needs neither, and they take seconds.
if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from npt.batch import Batch

VOCAB = 128

gc.disable()  # until all is collected, which stays: searches for garbage would take seconds


def _pool_made_anew() -> None:
    """Make torch's pool of threads anew in a fork: threads that load weights would otherwise do it
    all at once, and now and then fail.
    """
    import torch

    torch.set_num_threads(1)


# First of all (they run in this order), never collect what an earlier test left: a store
# or a process group waits in its destructor for a thread that no fork has.
os.register_at_fork(after_in_child=gc.freeze)
os.register_at_fork(after_in_child=_pool_made_anew)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--slow", action="store_true", help="run everything, the tests marked slow too"
    )
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a test that would be skipped fails: what it lacks must be installed",
    )
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for a test; obeyed where pytest-timeout is installed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, and so report in the closing line, what this machine or this call is not for.

    A test that is named by its node id runs in any case.
    """
    by_rule = slow([item.nodeid for item in items if "gpu" not in item.keywords], listed())
    for item in items:
        if item.nodeid in by_rule:
            item.add_marker(pytest.mark.slow)
    import torch

    everything = config.getoption("--slow") or any("::" in argument for argument in config.args)
    unwanted = [
        item
        for item in items
        if ("slow" in item.keywords and not everything)
        or ("gpu" in item.keywords and not torch.cuda.is_available())
    ]
    config.hook.pytest_deselected(items=unwanted)
    kept = set(items) - set(unwanted)
    items[:] = [item for item in items if item in kept]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("--no-skips"):
        report.outcome, report.longrepr = (
            "failed",
            f"skipped, where nothing may be: {report.longrepr[-1]}",
        )


def pytest_collection_finish() -> None:
    """Leave what stays for good, libraries and tests by the million objects, out of every later
    search for garbage.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose the device of a test before its fixtures run, those of its module included: a GPU only
    if it is marked `gpu`.
    """
    if item.get_closest_marker("gpu") is None:
        os.environ["NPT_DEVICE"] = "cpu"
    else:
        os.environ.pop("NPT_DEVICE", None)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Results that do not depend on how many cores share a sum; at these sizes one thread is also
    the fastest.
    """
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_wait_for_the_disk() -> Iterator[None]:
    """A sync protects from a power cut alone, and no test makes one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="module")
def undrawn_charts() -> Iterator[None]:
    """Give charts their words and no content, for folders of tests that do not look at them:
    matplotlib takes longer than the runs whose reports hold them.
    """
    from npt.report import charts

    def empty(heading: str, unit: str, series: Any, *, marks: Any = (), **_: Any) -> charts.Chart:
        words = charts._words(heading, series[0][2], len(marks))
        svg = '<svg xmlns="http://www.w3.org/2000/svg"><g/></svg>'
        return charts.Chart(None, charts.clean(words), svg)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "lines", empty)
        yield


@pytest.fixture
def obeyed_signals() -> Iterator[None]:
    """SIGINT and SIGHUP as in a terminal, also in a suite that inherits them ignored, as it does
    under nohup and in the background of a script: those who test that they stop work.
    """
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def copied_bases() -> Iterator[None]:
    """Read and pack a checkpoint once, and give copies: in `npt.load_base`, whoever calls it, for
    folders of tests in which most load the same base.
    """
    from copies import LOADS

    from npt.base import load as loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_read_weights", LOADS)
        yield


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped-query attention, saved in bf16: D 64, F 128, 4 layers, V 128. It
    has no tokenizer.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128}
    size |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    # large enough that attention and MLP matter next to the residual stream
    more = {"initializer_range": 0.15, "tie_word_embeddings": False}
    config = LlamaConfig(max_position_embeddings=128, **size, **special, **more)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


class FakeTokenizer:
    """Characters as tokens, folded into the small vocabulary."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2

    def __call__(self, texts: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, list]:
        start = [self.bos_token_id] if add_special_tokens else []
        each = [texts] if isinstance(texts, str) else texts
        ids = [[*start, *(3 + ord(c) % (VOCAB - 3) for c in text)] for text in each]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        space = 3 + ord(" ") % (VOCAB - 3)
        return ["Ġ" if i == space else chr(96 + i) for i in ids]


@pytest.fixture
def tokenizer() -> FakeTokenizer:
    return FakeTokenizer()


@pytest.fixture(scope="session")
def _few_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginnings of the first files of either split of the standard library, some 90 KB of 12
    MB.
    """
    from npt.data import readers

    folder = tmp_path_factory.mktemp("library")
    for split, count in (("train", 24), ("heldout", 6)):
        for name, text in itertools.islice(readers.builtin_files(split), count):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text[:3000], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def short_library(_few_sources: Path) -> Iterator[None]:
    """Makes the built-in text a short one, in processes that are forked here as well: to read and
    tokenise all of it takes seconds.
    """
    from npt.data import readers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            readers, "sysconfig", SimpleNamespace(get_paths=lambda: {"stdlib": str(_few_sources)})
        )
        yield


LoadModel = Callable[..., "LlamaForCausalLM"]


@pytest.fixture(scope="session")
def load_model(llama_folder: Path) -> LoadModel:
    """A fresh copy of the random Llama at every call, as `npt.load_base` would give it; NF4 unless
    told otherwise.
    """
    import torch
    from copies import copied

    import npt
    from npt.base.source import EMBEDDED_FOLDER
    from npt.config import QUANT_TYPES

    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("a base needs the torch of the extra distill")
    # load_base wants a tokenizer with the weights; the embedded model's serves.
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / file, llama_folder / file)

    def read(quantization: str | None, **arguments: Any) -> "LlamaForCausalLM":
        return npt.load_base(
            str(llama_folder), quantization=quantization, device="cpu", **arguments
        )[0]

    # now, before any test has anything patched
    loaded = {quantization: read(quantization) for quantization in (*QUANT_TYPES, None)}

    def load(quantization: str | None = "nf4", **arguments: Any) -> "LlamaForCausalLM":
        return read(quantization, **arguments) if arguments else copied(loaded[quantization])

    return load


@pytest.fixture
def batch() -> "Batch":
    """Three rows of 9, 5 and 7 valid tokens, padded on the right to 9."""
    import torch

    from npt.batch import batch_from_tensors

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, 9), generator=generator)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    mask[2, 7:] = 0
    return batch_from_tensors(ids * mask + 2 * (1 - mask), mask)


@pytest.fixture(scope="session")
def tiny_folder(llama_folder: Path, load_model: Any) -> Path:
    """The random Llama's folder, with a tokenizer."""
    return llama_folder


@pytest.fixture(scope="session")
def poisoned_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Llama with an embedding of 1e30 for RARE: every number is finite, its square is
    not.
    """
    from stopped_runs import RARE, with_row

    return with_row(tiny_folder, tmp_path_factory.mktemp("poisoned") / "model", RARE, 1e30)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    """`trainer(base, data, **config)`, its run folder below the test's own."""
    from stopped_runs import make_trainer

    return lambda base, data, **config: make_trainer(base, data, tmp_path / "run", **config)


@pytest.fixture(scope="session")
def _made_once(poisoned_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from stopped_runs import BAD, good, make_trainer, stop

    run = tmp_path_factory.mktemp("made") / "run"
    data = [*good(15), BAD]
    return stop(make_trainer(poisoned_folder, data, run, gradient_accumulation_steps=2))


@pytest.fixture
def bundle(_made_once: Path, tmp_path: Path) -> Path:
    """A copy of the bundle of a run in windows of two that met BAD after some steps."""
    return shutil.copytree(_made_once, tmp_path / "postmortem" / _made_once.name)
