"""Load an exported folder in a process that has no npt and write down its logits. Run as a script
by npt/adapters/files/export.py:

python -P load_exported.py FOLDER INPUTS.safetensors OUTPUTS.safetensors DEVICE
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class WithoutNPT(MetaPathFinder):
    """Finds no package npt, wherever it is installed."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == "npt":
            raise ModuleNotFoundError(f"{fullname} is kept out of this process", name=fullname)


def main(folder: str, inputs: str, outputs: str, device: str) -> None:
    """Write logits [B, T, V] of the ids [B, T] in `inputs`, in fp32; exit if keys do not fit."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        trust_remote_code=True,
        device_map={"": device},
        output_loading_info=True,
        local_files_only=True,
    )
    odd = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if odd:
        sys.exit(f"keys of the weights do not fit: {odd}"[:300])
    with torch.no_grad():
        logits = model(load_file(inputs)["ids"].to(device)).logits
    save_file({"logits": logits.to("cpu", torch.float32).contiguous()}, outputs)


if __name__ == "__main__":
    sys.meta_path.insert(0, WithoutNPT())
    main(*sys.argv[1:])
