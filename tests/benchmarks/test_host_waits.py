import warnings

import pytest
import torch

from host_waits import HostWaitError, count_waits, no_waits

WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "a mask as index": lambda x: x[x > 0],
    "a mask as index to write to": lambda x: x.clone().index_put_((x > 0,), torch.ones(3)),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("act", WAITS.values(), ids=WAITS.keys())
def test_what_would_wait_is_counted_and_refused(act):
    x = torch.tensor([1.0, -1.0, 2.0, 3.0])
    with count_waits("cpu") as found:
        act(x)
    assert found.total() >= 1
    with pytest.raises(HostWaitError, match="would make the host wait"), no_waits("cpu"):
        act(x)
    act(x)  # outside of the context it is as it was


def test_what_stays_on_the_device_is_neither_counted_nor_refused():
    x = torch.randn(4, 4, requires_grad=True)
    with no_waits("cpu"), count_waits("cpu") as found:
        y = torch.where(x > 0, x, 0.0).index_select(0, torch.tensor([2, 1]))
        (y[torch.tensor([0, 1])] @ x).sum().backward()
    assert not found and x.grad is not None


class Mode:
    """torch.cuda's debug mode on a machine without CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.seen = 0, []
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)

    def set(self, mode: int | str) -> None:
        self.now = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        self.seen.append(self.now)


def test_on_cuda_the_debug_mode_is_set_and_restored_whatever_happens(monkeypatch):
    mode = Mode(monkeypatch)
    mode.now = 1
    with pytest.raises(ValueError, match="mine"), no_waits("cuda"):
        assert mode.now == 2
        raise ValueError("mine")
    assert mode.seen == [2, 1]


def test_on_cuda_torch_s_error_becomes_ours_and_no_other_does(monkeypatch):
    Mode(monkeypatch)
    with (
        pytest.raises(HostWaitError, match=r"^called a synchronizing CUDA operation$"),
        no_waits("cuda"),
    ):
        raise RuntimeError("called a synchronizing CUDA operation\nmore")
    with pytest.raises(RuntimeError, match=r"^other$") as caught, no_waits("cuda"):
        raise RuntimeError("other")
    assert not isinstance(caught.value, HostWaitError)


def test_on_cuda_torch_s_warnings_are_counted_and_others_pass(monkeypatch):
    mode = Mode(monkeypatch)
    with pytest.warns(UserWarning, match=r"^another$") as passed, count_waits("cuda") as found:
        assert mode.now == 1
        for _ in range(3):
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally)", stacklevel=1
            )
        warnings.warn("another", stacklevel=1)
    assert found.total() == 3 and len(passed) == 1 and mode.now == 0
