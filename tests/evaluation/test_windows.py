"""Generation of models that look back through a window: every way to it gives the tokens of each
prompt alone, computed anew.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import MAKE, VOCAB, WINDOW, save_base
from slow_greedy import alone
from students import moved
from torch import Tensor

import npt
from npt.base.attention import SDPA
from npt.base.source import load_tokenizer
from npt.evaluation.generate import write
from npt.evaluation.greedy import continue_greedily, end_ids

PROMPTS = [
    torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (1, WINDOW - 1, 11, WINDOW, 2 * WINDOW + 1)
]
NAMES = list("abcde")
NEW = WINDOW + 2


WINDOWED = [name for name in MAKE if "window" in name]


@pytest.fixture(scope="module", params=WINDOWED)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def windowed(family, tmp_path_factory) -> Any:
    """A 4-bit student, away from its teacher, of every family that has windows."""
    folder = save_base(family, tmp_path_factory.mktemp("base"))
    model, _ = npt.load_base(str(folder), quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=4, layers="1,3", residual="keep"))
    return moved(model, 0.15)


@pytest.fixture(scope="module")
def mode(family, windowed) -> Iterator[str]:
    """Student and teacher in turns."""
    name = ("student", "teacher")[WINDOWED.index(family) % 2]
    with npt.adapter_mode(windowed, name):
        yield name


@pytest.fixture(scope="module")
def texts(windowed, mode) -> list[list[int]]:
    """Return each prompt's continuation, every token computed anew from the whole row."""
    return [alone(windowed, prompt, NEW) for prompt in PROMPTS]


def test_prompts_of_unequal_length_give_what_each_gives_alone(
    windowed, mode, texts, monkeypatch
) -> None:
    attention = {"student": SDPA, "teacher": "eager"}[mode]
    monkeypatch.setattr(windowed.config, "_attn_implementation_internal", attention)
    seen: list[Tensor] = []
    hook = windowed.lm_head.register_forward_hook(lambda _, __, output: seen.append(output))
    found = continue_greedily(windowed, PROMPTS, [NEW] * 5, (), NAMES)
    hook.remove()
    assert found == texts
    assert len({tuple(tokens) for tokens in found}) == 5
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, found, strict=True)):
        with torch.no_grad():
            expected = windowed(torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[
                0, len(prompt) - 1 :
            ]
        # products of other shapes sum in another order, through four layers
        torch.testing.assert_close(
            torch.stack([step[row] for step in seen]),
            expected,
            rtol=0,
            atol=2e-5 * float(expected.abs().max()),
        )


@pytest.mark.parametrize("attention", [SDPA, "eager"])
def test_a_prompt_has_a_key_for_every_query_whatever_it_is_padded_to(
    windowed, monkeypatch, attention
) -> None:
    monkeypatch.setattr(windowed.config, "_attn_implementation_internal", attention)
    seen: list[Tensor] = []
    for layer in windowed.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, given: seen.append(given["attention_mask"]), with_kwargs=True
        )
    continue_greedily(windowed, PROMPTS, [NEW] * 5, (), NAMES)
    for layer in windowed.model.layers:
        layer.self_attn._forward_pre_hooks.clear()
    assert len(seen) == NEW * 4
    assert all(
        bool((mask if mask.dtype == torch.bool else mask == 0).any(dim=-1).all()) for mask in seen
    )


def test_transformers_own_generation_gives_it_too_padded_on_the_left(windowed, mode, texts) -> None:
    width = max(len(prompt) for prompt in PROMPTS)
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    for how in (
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
    ):
        found = windowed.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=-1, **how
        )
        assert found[:, width:].tolist() == texts, how


@pytest.fixture(scope="module")
def words() -> Any:
    return load_tokenizer()


def test_what_npt_generate_writes_crosses_the_window(windowed, mode, words) -> None:
    prompt = PROMPTS[1 if mode == "teacher" else 2]
    found = write(windowed, words, prompt, NEW)
    assert list(found.ids) == alone(windowed, prompt, NEW, end_ids(windowed, words))
