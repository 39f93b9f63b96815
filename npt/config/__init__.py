"""Every setting, once: frozen dataclasses, checked when they are made.

The command line, the YAML file and `run.json` are generated from these fields, so a flag is its
field's name (or its `flag`) and its help is the field's `help`. A combination that cannot work
raises `ConfigError`; nothing is silently ignored.
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
from npt.config.field import GROUPS, INT_MAX, flag_of, kinds_of, parse_steps
from npt.config.training import (
    LOGIT_LOSSES,
    LOSSES,
    MAX_STEPS,
    SCHEDULES,
    SEED_MAX,
    STRATEGIES,
    TrainConfig,
)
