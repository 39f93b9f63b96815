"""Views of one model: each runs in its own mode, as teacher, student or floor, and shares all else.

Code that takes two models at once takes two views: each is a shallow copy, with settings of its own
for generation, whose forward is the model's own with its adapters' mode set for as long as it runs.
Weights, buffers and modules are the model's, also as they change later; a view costs no memory and
does not keep the adapters alive after `detach`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers import PreTrainedModel

from npt.adapters.converted import VIEWED, adapter_mode, attached_config, viewed
from npt.adapters.layer import Mode


def student_view(model: PreTrainedModel) -> Any:
    """Return the model as its student, for example as the draft model of its teacher:
    `teacher_view(model).generate(..., assistant_model=student_view(model))`."""
    return mode_view(model, "student")


def teacher_view(model: PreTrainedModel) -> Any:
    """Return the model as its teacher, the base."""
    return mode_view(model, "teacher")


def mode_view(model: PreTrainedModel, mode: Mode) -> Any:
    """Return a model of the same class that runs in `mode`, and leaves the given one in its own.

    `config` and `generation_config` are copies, hooks on the view itself its own; hooks on the
    model run as well. Forward and generate obey the mode; `view.model` is the shared decoder, in
    the mode that it is in.

    Args:
        model: with adapters attached, or a view of such a model.
        mode: student, teacher or floor.

    Raises:
        ModelError: no adapters are attached; of a forward, that they were detached since.
    """
    model = viewed(model)
    attached_config(model)
    view = copy.copy(model)
    for name, value in vars(model).items():
        # The view's hooks stay off the model, whose own run when the view calls it, and only then.
        if name.startswith(("_forward_", "_backward_")):
            vars(view)[name] = type(value)()
        elif isinstance(value, dict | set):
            vars(view)[name] = copy.copy(value)
    vars(view)[VIEWED] = model  # past Module.__setattr__, which would take it for a child
    view.config = copy.deepcopy(model.config)
    view.generation_config = copy.deepcopy(model.generation_config)

    @functools.wraps(model.forward)  # generate looks at the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        attached_config(model)
        with adapter_mode(model, mode):
            return model(*args, **kwargs)

    view.forward = forward
    return view
