"""A language model in which each token's attention output modulates that token's MLP.

Needs only torch and transformers. A modulated decoder layer computes, from a token's state h and
its attention output a = Attention(RMSNorm1(h)):

    z = A a                                       a low-rank code of the attention output
    h' = h + alpha (B_stream z)                   h alone without the target stream
    x = RMSNorm2(h')
    m = 1 + beta (2 sigmoid(M z) - 1),   s = alpha (B z)        for each of gate, up, down
    gate' = m_gate * gate_proj(x) + s_gate        up' and down' likewise
    o = h' + down'(act(gate') * up')

With `keep_residual`, h + a replaces h. In a layer of `patches`, outer (inner p) is added to the
product of down_proj and p. With a `token_part`, l takes from the token's own state what
needs no context, r = rms(h), and the code carries the rest:

    l = b + L_out L_in RMSNorm1(h)
    z = c A (a - l) / r, and 0 where |z| < tau    all numbers without `active`
    h' = h + l + r alpha (B_stream z / c)

Attention, caches, masks and everything else come from
transformers' model of the base's family.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from .configuration_npt import NPTLlamaConfig

FORMS = {
    "half_sigmoid": lambda u: 0.5 * torch.sigmoid(u) + 0.5,
    "one_plus_tanh": lambda u: 1.0 + torch.tanh(u),
    "unbounded": lambda u: 1.0 + u,
}


class LayerAdapter(nn.Module):
    """The modulation of one layer, in fp32 even if the model computes in another dtype.

    A [R, D]; M and B [O, R] by target. The stream has no M. With a token part b [D], scale (c) [R],
    L_in [Q, D], L_out [D, Q] and log_tau [1]. With a patch outer [D, n] and inner [n, F].
    """

    def __init__(self, config, index: int):
        super().__init__()
        form = config.npt
        self.form = form
        rank = form["ranks"][str(index)]
        d = config.hidden_size
        f = config.intermediate_size
        width = {"stream": d, "gate": f, "up": f, "down": d}

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=torch.float32))

        self.A = empty(rank, d)
        # M does not act on the stream, and the stream has a B in every form
        shifted = [t for t in form["targets"] if form["additive"] or t == "stream"]
        multiplied = [t for t in form["targets"] if form["multiplicative"] and t != "stream"]
        self.B = nn.ParameterDict({t: empty(width[t], rank) for t in shifted})
        self.M = nn.ParameterDict({t: empty(width[t], rank) for t in multiplied})
        if form["token_part"]:
            self.b = empty(d)
            self.scale: Tensor
            self.register_buffer("scale", torch.ones(rank, dtype=torch.float32))
        if form["token_rank"]:
            self.L_in = empty(form["token_rank"], d)
            self.L_out = empty(d, form["token_rank"])
        if form["active"]:
            self.log_tau = empty(1)
        size = form["patches"].get(str(index))
        self.patched = size is not None
        if self.patched:
            self.outer = empty(d, size)
            self.inner = empty(size, f)

    def _apply(self, fn, recurse: bool = True):
        """Move with the model but ignore casts: `model.to(torch.bfloat16)` is for the base."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)

    def code(self, attention: Tensor) -> Tensor:
        """Return z from a, or from (a - l) / r: [..., D] -> [..., R]."""
        with torch.autocast(attention.device.type, enabled=False):
            z = F.linear(attention.to(self.A.dtype), self.A)
            if self.form["token_part"]:
                z = self.scale * z
            if self.form["active"]:
                z = torch.where(z.abs() < self.log_tau.exp(), 0.0, z)
            return z

    def own(self, x: Tensor) -> Tensor:
        """Return the token part l from RMSNorm1(h), [..., D]."""
        with torch.autocast(x.device.type, enabled=False):
            if not self.form["token_rank"]:
                return self.b.expand(x.shape)
            inner = F.linear(x.to(self.b.dtype), self.L_in)
            return F.linear(inner, self.L_out, self.b)

    def modulate(self, target: str, y: Tensor, z: Tensor) -> Tensor:
        """Return y' of one target, [..., O], in the dtype of y."""
        if target not in self.form["targets"]:
            return y
        with torch.autocast(y.device.type, enabled=False):
            out = y.to(z.dtype)
            if target in self.M:
                out = self.multiplier(F.linear(z, self.M[target])) * out
            if target in self.B:
                out = out + self.form["additive_scale"] * F.linear(z, self.B[target])
            return out.to(y.dtype)

    def patch(self, y: Tensor, p: Tensor) -> Tensor:
        """Return the product y [..., D] of down_proj and p [..., F] with the patch added."""
        if not self.patched:
            return y
        with torch.autocast(y.device.type, enabled=False):
            inner = F.linear(p.to(self.outer.dtype), self.inner)
            added = F.linear(inner, self.outer)
            return (y.to(added.dtype) + added).to(y.dtype)

    def multiplier(self, u: Tensor) -> Tensor:
        """Return m from u = M z. tanh(u / 2) is 2 sigmoid(u) - 1 without cancellation near 0."""
        other = FORMS.get(self.form["mult_form"])
        if other is not None:
            return other(u)
        return 1.0 + self.form["mult_bound"] * torch.tanh(0.5 * u)


class NPTLlamaDecoderLayer(LlamaDecoderLayer):
    """The decoder layer of the base's family with a modulated MLP."""

    npt: LayerAdapter

    def forward(self, hidden_states, **context):
        x = self.input_layernorm(hidden_states)
        attention, _ = self.self_attn(hidden_states=x, **context)
        npt = self.npt
        if npt.form["token_part"]:
            own = npt.own(x)
            h = hidden_states.to(npt.A.dtype)
            # bounded for a token whose state is about 0
            size = h.square().mean(dim=-1, keepdim=True).clamp_min(1e-3**2).sqrt()
            z = npt.code((attention - own) / size)
            stream = npt.modulate("stream", h + own, size * (z / npt.scale))
            stream = stream.to(hidden_states.dtype)
        else:
            z = npt.code(attention)
            stream = hidden_states
            if npt.form["keep_residual"]:
                stream = stream + attention
            stream = npt.modulate("stream", stream, z)
        x = self.post_attention_layernorm(stream)
        gate = npt.modulate("gate", self.mlp.gate_proj(x), z)
        up = npt.modulate("up", self.mlp.up_proj(x), z)
        p = self.mlp.act_fn(gate) * up
        down = npt.patch(self.mlp.down_proj(p), p)
        return stream + npt.modulate("down", down, z)


class NPTModel(PreTrainedModel):
    """What an NPT model adds to its family's class."""

    config_class = NPTLlamaConfig
    _keep_in_fp32_modules_strict = ["npt"]  # noqa: RUF012 - as transformers has it
    _no_split_modules = ["LlamaDecoderLayer", "NPTLlamaDecoderLayer"]  # noqa: RUF012

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        layers = self.base_model.layers
        for index in map(int, config.npt["ranks"]):
            layers[index].__class__ = NPTLlamaDecoderLayer
            layers[index].npt = LayerAdapter(config, index)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded
        if isinstance(loaded, tuple):  # with `output_loading_info`
            model, _ = loaded
        for name, parameter in model.named_parameters():
            if ".npt." in name or hasattr(parameter, "quant_state"):
                continue
            # next to 4-bit weights, transformers leaves the others in their file's dtype
            if parameter.device.type != "meta":
                parameter.data = parameter.data.to(model.config.dtype)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # on CPUs with AVX512-BF16, a 4-bit layer would ignore its compute dtype
                module.support_avx512bf16_for_cpu = False
        return loaded

    def save_pretrained(self, *args, **kwargs):
        # keep the current names: transformers cannot convert those of 4-bit weights back
        kwargs.setdefault("save_original_format", False)
        return super().save_pretrained(*args, **kwargs)


class NPTLlamaModel(NPTModel, LlamaModel):
    pass


class NPTLlamaForCausalLM(NPTModel, LlamaForCausalLM):
    pass
