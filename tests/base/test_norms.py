"""RMSNorm in one kernel: where it is taken, its values, and what stays as it was."""

import pickle

import pytest
import torch
from simulated_cuda import simulated_cuda
from torch.nn import functional
from torch.testing import assert_close

from npt.base.norms import FUSED
from npt.base.precision import settle_policy


@pytest.mark.parametrize("norm", FUSED, ids=lambda norm: norm.__name__)
def test_on_a_gpu_one_kernel_gives_what_the_module_gave(norm, monkeypatch) -> None:
    calls: list[str] = []
    fused = functional.rms_norm
    monkeypatch.setattr(
        functional,
        "rms_norm",
        lambda *args, **named: calls.append("fused") or fused(*args, **named),
    )
    module = norm(48, eps=1e-5).to(torch.bfloat16).requires_grad_(False)
    torch.nn.init.normal_(module.weight)
    x, weight = torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 5, 48)
    plain = module(x)
    (gradient,) = torch.autograd.grad((plain * weight).sum(), x)
    settle_policy(module, torch.float32)
    module.register_forward_hook(lambda *_: calls.append("hook"))
    assert torch.equal(module(x), plain)
    assert pickle.loads(pickle.dumps(type(module))) is type(module) is FUSED[norm]
    assert module(x.bfloat16()).dtype == torch.bfloat16 and calls == ["hook", "hook"]
    with simulated_cuda():
        module.to("cuda"), calls.clear()
        there = x.detach().to("cuda").requires_grad_()
        output = module(there)
        (output * weight.to("cuda")).sum().backward()
        assert set(calls) == {"fused", "hook"}
        assert_close(output.detach().cpu(), plain.detach())
        assert_close(there.grad.cpu(), gradient)
