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
