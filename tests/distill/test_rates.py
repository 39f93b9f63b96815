"""The learning rates of a student's parameters."""

import pytest

import npt
from npt.adapters.converted import adapter_parameters
from npt.config import TrainConfig
from npt.distill.step import PRODUCT_RATE, student_guard

RATE = 1e-4
NEAR = {"init": "calibrated"}
TOKENS = {"strategy": "end_to_end", "logit_kl_weight": 1.0, "logit_loss": "cross_entropy"}


@pytest.mark.parametrize(
    ("form", "objective", "share"),
    [
        (NEAR, {}, PRODUCT_RATE),
        ({}, {}, 1.0),  # a random start is far from its teacher
        (NEAR, TOKENS, 1.0),  # learns the data's tokens, not the teacher's
    ],
)
def test_products_of_a_student_close_to_its_teacher_train_at_a_share_of_the_rate(
    load_model, form, objective, share
):
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=4, layers="2", **form))
    before = {name: p.detach().clone() for name, p in adapter_parameters(model).items()}
    with student_guard(model, TrainConfig(learning_rate=RATE, **objective), [RATE]) as guard:
        with guard.micro_batch(1, ("a",)) as micro:
            micro.loss = sum(parameter.sum() for parameter in adapter_parameters(model).values())
            micro.loss.backward()
        guard.step()
    for name, parameter in adapter_parameters(model).items():
        moved = float((parameter.detach() - before[name]).abs().max())
        of_product = name.rpartition(".")[2] in ("gate", "up", "down")
        # the first step of Adam moves by the rate; sums of fp32 round by 1e-7 of the parameter
        assert moved == pytest.approx(RATE * (share if of_product else 1.0), rel=1e-2), name
