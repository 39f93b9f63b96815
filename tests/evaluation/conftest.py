"""Students that are near their teacher without being it, on the random Llama and on the embedded
model.
"""

from collections.abc import Callable

import pytest
from students import moved
from transformers import LlamaForCausalLM

import npt


@pytest.fixture
def student(load_model: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    """Agrees with its teacher for some tokens, not for all."""
    model = load_model()
    npt.attach(
        model, npt.NPTConfig(rank=4, layers="1,3", residual="keep", targets=("gate", "up", "down"))
    )
    return moved(model, 0.15)


@pytest.fixture(scope="session")
def tiny() -> tuple[LlamaForCausalLM, object]:
    """The embedded model in 4 bit with a student near its teacher, and its tokenizer. Tests leave
    it as it is.
    """
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=8, residual="keep"))
    return moved(model, 0.05), tokenizer
