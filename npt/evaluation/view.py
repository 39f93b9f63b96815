"""Views of one model that each run in their own mode: teacher, student or floor.

Pass two views to code that takes two models. A view is a shallow copy with its own generation
settings. Its forward sets the adapters' mode, runs the model's forward and restores the mode.
Weights, buffers and modules stay shared, so a view takes no memory and does not keep the adapters
alive after `detach`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from transformers import PreTrainedModel

from npt.adapters.converted import VIEWED, adapter_mode, attached_config, viewed
from npt.adapters.layer import Mode


def student_view(model: PreTrainedModel) -> Any:
    """Return a view that runs as the student, for example to draft for the teacher:
    `teacher_view(model).generate(..., assistant_model=student_view(model))`."""
    return mode_view(model, "student")


def teacher_view(model: PreTrainedModel) -> Any:
    """Return a view that runs as the teacher, the base."""
    return mode_view(model, "teacher")


def mode_view(model: PreTrainedModel, mode: Mode) -> Any:
    """Return a view of the model that runs in `mode`; the model keeps its own mode.

    Forward and generate use the mode, but `view.model` is the shared decoder in its current mode.
    `config` and `generation_config` are copies. A forward runs the hooks of the view and those of
    the model.

    Args:
        model: a model with adapters attached, or a view of one.
        mode: student, teacher or floor.

    Raises:
        ModelError: no adapters are attached. A later forward raises it if they were detached.
    """
    model = viewed(model)
    attached_config(model)
    view = copy.copy(model)
    attributes = vars(view)
    for name, value in vars(model).items():
        holds_hooks = name.startswith(("_forward_", "_backward_"))
        if holds_hooks:
            # Start without any: those of the model run when the view calls it.
            kind = type(value)
            attributes[name] = kind()
        elif isinstance(value, dict | set):
            attributes[name] = copy.copy(value)
    attributes[VIEWED] = model  # Module.__setattr__ would register it as a child
    view.config = copy.deepcopy(model.config)
    view.generation_config = copy.deepcopy(model.generation_config)

    @functools.wraps(model.forward)  # generate inspects the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        attached_config(model)
        with adapter_mode(model, mode):
            return model(*args, **kwargs)

    view.forward = forward
    return view
