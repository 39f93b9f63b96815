"""NPT adapters for code that uses PEFT: after `npt.register_peft()`,
`peft.PeftModel.from_pretrained(base, folder)` loads one.

PEFT looks configuration and tuner up in public mappings by the file's `peft_type`; the entry "NPT"
is put there on request, never on import.
"""

from __future__ import annotations

from typing import Any

from npt.extras import require


def register_peft() -> None:
    """Let PEFT load NPT adapters, in this process. Calling it again changes nothing.

    Raises:
        ConfigError: PEFT is not installed.
    """
    require("peft", "npt.register_peft()")
    import peft
    from peft import mapping

    from npt.adapters.files.peft_tuner import PEFT_TYPE, NPTPeftConfig, NPTTuner

    # keyed by a plain string: PEFT's keys are strings too, members of its enumeration
    kind: Any = PEFT_TYPE
    peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind] = NPTPeftConfig
    peft.PEFT_TYPE_TO_TUNER_MAPPING[kind] = NPTTuner
    mapping.PEFT_TYPE_TO_PREFIX_MAPPING[kind] = NPTTuner.prefix
