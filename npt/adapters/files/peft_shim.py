"""NPT adapters for code that uses PEFT: after `npt.register_peft()`,
`peft.PeftModel.from_pretrained(base, folder)` loads one.

PEFT's `register_peft_method` refuses methods that its own enumeration does not name, but it looks
configuration and tuner up in two public mappings by the file's `peft_type`. The entry "NPT" is put
there on request, never on import.
"""

from __future__ import annotations

from typing import Any

from npt.errors import ModelError
from npt.extras import install_command


def register_peft() -> None:
    """Let PEFT load NPT adapters, in this process. Calling it again changes nothing.

    Raises:
        ModelError: PEFT is not installed, too old, or knows another method of this name.
    """
    try:
        import peft
        from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
        from peft.tuners.tuners_utils import BaseTuner
    except ImportError as error:
        raise ModelError(
            f"PEFT cannot be imported ({error}); install it with {install_command('peft')}"
        ) from error
    # an older one would load no tensor, and not say so
    if not hasattr(BaseTuner, "_remap_adapter_state_dict_for_load"):
        raise ModelError(
            f"PEFT {peft.__version__} has no way for a tuner to load its own tensors;"
            f" {install_command('peft')} --upgrade"
        )
    from npt.adapters.files.peft_tuner import PEFT_TYPE, NPTPeftConfig, NPTTuner

    # keyed by a plain string: PEFT's keys are strings too, members of its enumeration
    configs: Any = peft.PEFT_TYPE_TO_CONFIG_MAPPING
    tuners: Any = peft.PEFT_TYPE_TO_TUNER_MAPPING
    prefixes: Any = PEFT_TYPE_TO_PREFIX_MAPPING
    known = tuners.get(PEFT_TYPE, NPTTuner)
    if known is not NPTTuner:
        raise ModelError(
            f"PEFT knows a method {PEFT_TYPE!r} already, {known.__module__}.{known.__name__};"
            " nothing is registered"
        )
    configs[PEFT_TYPE], tuners[PEFT_TYPE] = NPTPeftConfig, NPTTuner
    prefixes[PEFT_TYPE] = NPTTuner.prefix
