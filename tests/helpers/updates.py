"""Updates to consolidate that are as good as any for tests of how they are kept."""

import torch

from npt.adapters.consolidate import Consolidation, patched_module
from npt.adapters.converted import decoder_layers


def random_update(model, layers=(1, 2), *, size=2, seed=0, record=None) -> Consolidation:
    """Patches of rank `size`, large enough to be seen in the logits."""
    generator = torch.Generator().manual_seed(seed)
    patches = {}
    for index in layers:
        module = patched_module(decoder_layers(model)[index])
        outer = 0.3 * torch.randn(module.out_features, size, generator=generator)
        inner = torch.randn(size, module.in_features, generator=generator)
        patches[index] = outer, inner
    return Consolidation(patches, record or {"texts": [f"text {seed}"]}, (((1, 2, 3 + seed), 2),))
