"""Configurations of exported NPT models: that of the base's family, and the form of its modulation.

The types have names of their own, so that code without them does not load the base alone.
"""

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

# `npt` holds, for every family:
#     ranks            layer -> rank of its code z = A a, of the layers that are modulated
#     rows             layer -> targets that have a scale and a bias per row (consolidated updates)
#     targets          which products are modulated: gate, up, down
#     multiplicative   whether there is the factor m = 1 + mult_bound * (2 sigmoid(M z) - 1)
#     additive         whether there is the summand s = additive_scale * (B z)
#     keep_residual    whether attention stays in the residual stream
#     mult_form, mult_bound, additive_scale


def _attention_alone(config) -> dict:
    """Return the plan for tensor parallelism without MLPs: modulation needs whole products."""
    return {name: style for name, style in config.base_model_tp_plan.items() if ".mlp." not in name}


class NPTLlamaConfig(LlamaConfig):
    model_type = "npt_llama"
    base_model_tp_plan = _attention_alone(LlamaConfig)
    npt: dict | None = None


class NPTMistralConfig(MistralConfig):
    model_type = "npt_mistral"
    base_model_tp_plan = _attention_alone(MistralConfig)
    npt: dict | None = None


class NPTQwen2Config(Qwen2Config):
    model_type = "npt_qwen2"
    base_model_tp_plan = _attention_alone(Qwen2Config)
    npt: dict | None = None


class NPTQwen3Config(Qwen3Config):
    model_type = "npt_qwen3"
    base_model_tp_plan = _attention_alone(Qwen3Config)
    npt: dict | None = None


class NPTSmolLM3Config(SmolLM3Config):
    model_type = "npt_smollm3"
    base_model_tp_plan = _attention_alone(SmolLM3Config)
    npt: dict | None = None
