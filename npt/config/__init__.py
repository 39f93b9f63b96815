"""All settings, as frozen dataclasses that are checked when they are made.

The command line, the YAML file and `run.json` are made from the fields: a field's name (or its
`flag`) is the flag, with the field's `help`. Invalid combinations raise `ConfigError`.
"""

from npt.config.adapter import (
    INITS,
    MODULATIONS,
    MULT_FORMS,
    PRODUCTS,
    RESIDUALS,
    STREAM,
    TARGETS,
    NPTConfig,
)
from npt.config.base import ATTENTIONS, COMPUTE_DTYPES, QUANT_TYPES, BaseConfig, check_attention
from npt.config.data import DataConfig
from npt.config.field import (
    GROUPS,
    INT_MAX,
    check_need,
    flag_of,
    flags_of,
    kinds_of,
    parse_steps,
    written,
)
from npt.config.training import LOGIT_LOSSES, LOSSES, MAX_STEPS, SCHEDULES, STRATEGIES, TrainConfig
