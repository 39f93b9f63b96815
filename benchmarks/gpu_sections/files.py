"""Section 14: a checkpoint of realistic size, loaded whole and layer by layer."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import npt
from gpu_sections.models import full_batch
from gpu_sections.runner import Bench, Findings, Section
from npt.base.layers import real_layers
from npt.base.source import load_tokenizer
from npt.doctor.plan import shown
from npt.doctor.shape import SHAPES, llama_config


class HostPeak(AbstractContextManager["HostPeak"]):
    """The growth of this process's host memory, without pages of mapped files.

    Attributes:
        bytes: the largest so far.
    """

    def __enter__(self) -> HostPeak:
        self.bytes, self._before, self._over = 0, self._now(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def check_file(bench: Bench, findings: Findings) -> None:
    """Write a random model as a checkpoint, load it in NF4 whole and layer by layer, and compare
    the bytes; measure the memory of each on host and device.
    """
    folder = bench.folder / "checkpoint"
    config = llama_config(SHAPES[bench.pick("embedded", "llama-3.2-1b")], 256)
    with bench.device:
        written = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    written.save_pretrained(folder, max_shard_size="1GB")
    load_tokenizer("tiny").save_pretrained(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    del written
    findings.figures["file_bytes"] = size
    identities = []
    for name, later in (("whole", False), ("by layers", True)):
        gc.collect()
        before = 0
        if bench.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(bench.device)
            before = torch.cuda.memory_allocated(bench.device)
        started = time.perf_counter()
        with HostPeak() as host:
            model, _ = npt.load_base(
                str(folder), quantization="nf4", device=bench.device, layers_later=later
            )
            for _ in real_layers(model, bench.device) if later else ():
                pass  # the iterator reads each layer in turn
        seconds = time.perf_counter() - started
        peaks = {"host": host.bytes}
        if bench.cuda:
            peaks["device"] = torch.cuda.max_memory_allocated(bench.device) - before
        told = ", ".join(f"{place} {shown(peak)}" for place, peak in peaks.items())
        findings.notes.append(f"{name}: {told}, {seconds:.1f} s")
        findings.figures[name] = {"peak_bytes": peaks, "seconds": seconds}
        identities.append(npt.base_identity(model))
        batch = full_batch(1, 32, config.vocab_size, bench.device)
        with torch.no_grad():
            logits = model(batch.input_ids).logits
        findings.check(f"{name}: finite logits", bool(logits.isfinite().all()))
        if bench.cuda:
            # so that a host can load a 70B base that does not fit its memory
            few = host.bytes <= size / 2
            findings.target(f"{name}: host", few, f"{shown(host.bytes)} of {shown(size)}")
        del model
    findings.check("both loads give the same bytes", identities[0] == identities[1])
    findings.notes.insert(0, f"{shown(size)} of files")


FILES = Section(14, "load a checkpoint", check_file)
