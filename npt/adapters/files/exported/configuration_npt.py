"""Configuration of an exported NPT model: the base's, and the form of its modulation.

The type has a name of its own, so that code without it does not load the base alone.
"""

from transformers import LlamaConfig


class NPTLlamaConfig(LlamaConfig):
    """The base's configuration with `npt`, which holds:

    ranks            layer -> rank of its code z = A a, of the layers that are modulated
    targets          what is modulated: stream, gate, up, down
    multiplicative   whether there is the factor m = 1 + mult_bound * (2 sigmoid(M z) - 1)
    additive         whether there is the summand s = additive_scale * (B z)
    keep_residual    whether attention stays in the residual stream
    mult_form, mult_bound, additive_scale
    """

    model_type = "npt_llama"
    # for tensor parallelism, without MLPs: modulation needs whole products
    base_model_tp_plan = {  # noqa: RUF012 - as transformers has it
        name: style for name, style in LlamaConfig.base_model_tp_plan.items() if ".mlp." not in name
    }
    npt: dict | None = None
