"""Bundles that were changed and sealed again are replayed, or refused in one line."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from mutations import mutated, mutated_tensors
from safetensors.torch import load_file, save_file

from npt.errors import BundleError, NPTError
from npt.forensics.bundle import MOMENTS
from npt.forensics.student import replay_student
from npt.manifest import POSTMORTEM, write_manifest


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (64, 5)])
def test_a_moment_of_another_shape_never_reaches_the_optimizer(bundle: Path, shape) -> None:
    """Fused AdamW reads and writes beyond the end of one that is too small."""
    moments = load_file(bundle / MOMENTS)
    name = next(name for name in moments if name.startswith("exp_avg of "))
    save_file({**moments, name: torch.zeros(shape)}, bundle / MOMENTS)
    write_manifest(bundle)
    with pytest.raises(BundleError, match=f"{name} does not have the shape"):
        replay_student(bundle)


@pytest.mark.slow
def test_a_bundle_that_was_sealed_again_is_replayed_or_refused(bundle: Path) -> None:
    source = random.Random(0)
    record = (bundle / POSTMORTEM).read_text(encoding="utf-8")
    files = {path: load_file(path) for path in bundle.glob("*.safetensors")}
    ended = Counter[str]()
    for number in range(60):
        changed = source.choice(list(files))
        if number % 2:
            save_file(mutated_tensors(files[changed], source), changed)
        else:
            text = json.dumps(mutated(json.loads(record), source))
            (bundle / POSTMORTEM).write_text(text, encoding="utf-8")
        write_manifest(bundle)
        try:
            str(replay_student(bundle))
            ended["replayed"] += 1
        except NPTError as error:
            assert error.exit_status == 5 and "\n" not in str(error)
            ended["refused"] += 1
        save_file(files[changed], changed)
        (bundle / POSTMORTEM).write_text(record, encoding="utf-8")
    assert min(ended["replayed"], ended["refused"]) > 5, ended
