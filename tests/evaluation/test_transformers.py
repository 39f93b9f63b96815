"""Transformers' own ways to generate, on a model with adapters: each against the whole row computed
anew for every token.
"""

import pytest
import torch
import transformers
from slow_greedy import alone
from students import enlarge

import npt
from npt.adapters.converted import adapter_mode

PROMPTS = [[5], [9, 17, 40, 3, 77, 21, 8], [60, 61, 62]]
LIMIT = 8

# A cache holds the keys and values of earlier steps, computed in rows of other widths: fp32 sums in
# another order, on logits of size 10.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def endless(load_model):
    """Without end tokens, and a student that is far from its teacher, so that a mode gone wrong
    shows. Tests leave it as it is.
    """
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=4, layers="1,3"))
    enlarge(model, b=2000)
    model.generation_config.eos_token_id = None
    return model


def batch(prompts=PROMPTS, side: str = "left") -> dict[str, torch.Tensor]:
    """Padded with an id that is a word elsewhere, so that only the mask tells padding."""
    width = max(map(len, prompts))
    pads = [[9] * (width - len(p)) for p in prompts]
    rows = [
        [*pad, *p] if side == "left" else [*p, *pad] for p, pad in zip(prompts, pads, strict=True)
    ]
    mask = [
        [0] * len(pad) + [1] * len(p) if side == "left" else [1] * len(p) + [0] * len(pad)
        for p, pad in zip(prompts, pads, strict=True)
    ]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def generate(model, prompts=PROMPTS, **settings):
    given = batch(prompts)
    found = model.generate(
        **given,
        max_new_tokens=LIMIT,
        do_sample=False,
        pad_token_id=9,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return found.sequences[:, given["input_ids"].shape[1] :].tolist(), torch.stack(
        found.logits, dim=1
    )


def logits_alone(model, prompt: list[int], new: list[int]) -> torch.Tensor:
    """Logits of every new token, each from a row of its own."""
    rows = [torch.tensor([[*prompt, *new[:i]]]) for i in range(len(new))]
    with torch.no_grad():
        return torch.stack([model(input_ids=row, use_cache=False).logits[0, -1] for row in rows])


@pytest.mark.parametrize(
    ("cache", "mode"),
    [(None, "student"), ("dynamic", "teacher"), ("static", "floor"), ("static", "student")],
)
def test_a_batch_padded_on_the_left_equals_each_prompt_alone(endless, cache, mode) -> None:
    with adapter_mode(endless, mode):
        tokens, logits = generate(
            endless, **({} if cache is None else {"cache_implementation": cache})
        )
        assert tokens == [alone(endless, prompt, LIMIT) for prompt in PROMPTS]
        for row, prompt, new in zip(logits, PROMPTS, tokens, strict=True):
            torch.testing.assert_close(row, logits_alone(endless, prompt, new), **CLOSE)


@pytest.mark.parametrize("mode", ["student", "teacher"])
def test_beam_search_with_a_cache_finds_what_it_finds_without(endless, mode) -> None:
    settings = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0}
    with adapter_mode(endless, mode):
        tokens, _ = generate(endless, PROMPTS[1:2], **settings)
        assert tokens == generate(endless, PROMPTS[1:2], use_cache=False, **settings)[0]
    assert tokens[0] != tokens[1]


def test_the_students_drafts_leave_the_teachers_text(endless) -> None:
    teacher, student = npt.teacher_view(endless), npt.student_view(endless)
    tokens, _ = generate(teacher, PROMPTS[1:2], assistant_model=student)
    assert tokens == [alone(teacher, PROMPTS[1], LIMIT)]


TEXTS = ["class Stack:\n    def __init__(self", "import os", "def read(path):\n"]


@pytest.mark.parametrize(
    ("batch_size", "view"),
    [(1, npt.student_view), (3, npt.teacher_view)],
    ids=["student", "teacher"],
)
def test_the_pipeline_writes_the_models_own_text(tiny, batch_size, view) -> None:
    model, tokenizer = tiny
    model = view(model)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    found = pipe(
        TEXTS, batch_size=batch_size, max_new_tokens=LIMIT, do_sample=False, return_full_text=False
    )
    for text, (answer,) in zip(TEXTS, found, strict=True):
        expected = alone(model, tokenizer(text)["input_ids"], LIMIT, [tokenizer.eos_token_id])
        assert answer["generated_text"] == tokenizer.decode(expected, skip_special_tokens=True)
