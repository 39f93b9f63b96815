"""PEFT's classes of an NPT adapter; imported by `npt.register_peft` alone, since they need PEFT.

One adapter at a time, no merging, and of a folder with consolidated updates only the adapter.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.config import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from npt.adapters.attach import attach, detach
from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.adapters.files.adapter_files import PREFIX
from npt.base.identity import base_identity
from npt.config import NPTConfig
from npt.errors import AdapterFileError, ModelError

PEFT_TYPE = "NPT"


@dataclass
class NPTPeftConfig(PeftConfig):
    """`adapter_config.json` as PEFT reads it."""

    base_hash: str | None = None
    base_loading: dict[str, Any] | None = None
    base_parts: dict[str, Any] | None = None
    npt: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PEFT_TYPE


class NPTSwitch(nn.Module, BaseTunerLayer):
    """The module by which PEFT sees a model's adapters, and whether they are on."""

    adapter_layer_names = ("adapters",)

    def __init__(self, adapter_name: str):
        super().__init__()
        self.adapters = nn.ModuleDict({adapter_name: nn.Identity()})
        self._active_adapter = adapter_name


class NPTTuner(BaseTuner):
    """A model with NPT adapters attached, in PEFT's terms."""

    prefix = "npt."

    def __init__(self, model: Any, peft_config: Any, adapter_name: str, *_: Any, **__: Any):
        nn.Module.__init__(self)
        self.model = model
        if isinstance(peft_config, PeftConfig):
            peft_config = {adapter_name: peft_config}
        self.peft_config = dict(peft_config)
        self.active_adapter = adapter_name
        self.inject_adapter(model, adapter_name)
        self.switch = NPTSwitch(adapter_name)
        self.off = ExitStack()

    def inject_adapter(self, model: Any, adapter_name: str, *_: Any, **__: Any) -> None:
        if len(self.peft_config) > 1:
            del self.peft_config[adapter_name]
            raise ModelError(
                "an NPT adapter is alone on its model; load the other one onto a base of its own"
            )
        settings = self.peft_config[adapter_name]
        config = NPTConfig(**settings.npt)
        if settings.base_hash and (difference := base_identity(model).mismatch(vars(settings))):
            warnings.warn(
                f"the adapter was trained on another base: {difference}; npt.load_base with the"
                " same quantisation gives that one",
                stacklevel=2,
            )
        attach(model, config)
        self.set_requires_grad(adapter_name, not settings.inference_mode)

    def disable_adapter_layers(self) -> None:
        if not self.switch.disable_adapters:
            self.off.enter_context(adapter_mode(self.model, "teacher"))
        self.switch._disable_adapters = True

    def enable_adapter_layers(self) -> None:
        """Switch back to the mode before, the teacher within `npt.adapters_disabled`."""
        self.off.close()
        self.switch._disable_adapters = False

    def set_adapter(self, adapter_name: Any, inference_mode: bool = False) -> None:
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        if names != list(self.peft_config):
            raise ModelError(
                f"the model has the adapter {', '.join(self.peft_config)}, not {', '.join(names)}"
            )
        self.set_requires_grad(adapter_name, not inference_mode)

    def set_requires_grad(self, adapter_names: Any, requires_grad: bool = True) -> None:
        for parameter in adapter_parameters(self.model).values():
            parameter.requires_grad_(requires_grad)

    def unload(self) -> Any:
        detach(self.model)
        return self.model

    def merge_and_unload(self, *_: Any, **__: Any) -> Any:
        raise ModelError(
            "an NPT adapter depends on every token's context and cannot be merged; see"
            " npt.consolidate for one token's"
        )

    merge_adapter = merge_and_unload

    @classmethod
    def _get_adapter_state_dict(cls, *_: Any, **named: Any) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in named["state_dict"].items() if ".npt." in key}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the stored tensors if they are all of the model's and finite."""
        parameters = adapter_parameters(model.get_base_model()).items()
        wanted = {PREFIX + name: (parameter.shape, torch.float32) for name, parameter in parameters}
        for name in sorted({*wanted, *state_dict}):
            tensor = state_dict.get(name)
            kind = None if tensor is None else (tensor.shape, tensor.dtype)
            if kind != wanted.get(name) or not bool(state_dict[name].isfinite().all()):
                raise AdapterFileError(
                    f"the tensor {name!r} is missing, extra, misshapen, not fp32 or not finite; the"
                    " adapter is refused"
                )
        return state_dict

    # PEFT's own tuners replace modules; here layers are converted.
    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> bool:
        return False

    def _create_and_replace(self, *_: Any, **__: Any) -> None:
        raise AssertionError("NPT converts whole layers")

    def _mark_only_adapters_as_trainable(self, model: Any) -> None:
        return None

    def _prepare_adapter_config(self, peft_config: Any, model_config: Any) -> Any:
        return peft_config
