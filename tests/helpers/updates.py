"""Updates to consolidate that are as good as any for tests of how they are kept."""

import torch

from npt.adapters.consolidate import Consolidation, patched_module
from npt.adapters.converted import decoder_layers


def random_patch(module, size=3, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """outer [out, size] and inner [size, in] of a linear layer."""
    generator = torch.Generator().manual_seed(seed)
    outer = 0.3 * torch.randn(module.out_features, size, generator=generator)
    return outer, torch.randn(size, module.in_features, generator=generator)


def random_update(model, layers=(1, 2), *, size=2, seed=0, record=None) -> Consolidation:
    """Patches of rank `size`, large enough to be seen in the logits."""
    decoder = decoder_layers(model)
    patches = {
        index: random_patch(patched_module(decoder[index]), size, seed + index) for index in layers
    }
    return Consolidation(patches, record or {"texts": [f"text {seed}"]}, (((1, 2, 3 + seed), 2),))
