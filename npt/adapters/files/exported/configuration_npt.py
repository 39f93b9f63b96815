"""Configuration of an exported NPT model: the base's, and the form of its modulation.

It has its own model type, so that transformers without this code does not load the base alone.
"""

from transformers import LlamaConfig


class NPTLlamaConfig(LlamaConfig):
    """The base's configuration plus the dict `npt`, with these entries:

    ranks            by modulated layer, the rank of its code z = A a
    targets          what is modulated, among stream, gate, up and down
    multiplicative   whether products have the factor m = 1 + mult_bound * (2 sigmoid(M z) - 1)
    additive         whether products have the summand s = additive_scale * (B z)
    keep_residual    whether attention stays in the residual stream
    mult_form        form of m; the formula above is `sigmoid`
    mult_bound, additive_scale
    token_part       whether z is what the token's own state cannot say of its attention output
    token_rank       the rank of the map that says it; 0: a constant
    patches          by layer with an added low-rank patch of down_proj, its width
    active           numbers of z that are not 0 on average; 0: all
    """

    model_type = "npt_llama"
    # tensor parallelism leaves out the MLPs: modulation needs whole products
    base_model_tp_plan = {  # noqa: RUF012 - as transformers has it
        name: style for name, style in LlamaConfig.base_model_tp_plan.items() if ".mlp." not in name
    }
    npt: dict | None = None
