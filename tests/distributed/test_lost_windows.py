"""What is left of the windows that were under way when another process was lost: nothing."""

from typing import Any
from unittest import mock

import pytest
import torch
from windows import add_filled, window_over

from npt.distributed.processes import ProcessGroup
from npt.errors import ProcessError
from npt.guard.outcome import MicroBatch, send_record


class Broken(ProcessGroup):
    """One process of one, whose second window's sums never come."""

    waits = 0

    def check_unbroken(self) -> None:
        self.waits += 1
        if self.waits == 2:
            self.broken = True
            raise ProcessError("process 1 no longer responds")
        if self.broken:
            raise ProcessError("process 0 has already left the other processes")


@pytest.mark.parametrize("flush_only", [False, True])
def test_windows_whose_sums_never_came_have_not_happened(flush_only: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    processes = Broken()
    transaction = window_over(
        {"p": parameter}, optimizer, 1.0, [0.1], late=True, processes=processes
    )

    def fill() -> Any:
        parameter.grad += torch.ones(3)
        return MicroBatch(torch.ones(()), 1)

    def send(window: Any) -> None:
        send_record(window)
        window.arrived = mock.Mock()

    after = []
    with (
        mock.patch("npt.guard.window.send_record", send),
        mock.patch.object(transaction, "_unread", lambda: 2),
    ):
        for _ in range(2):
            add_filled(transaction, fill)
            transaction.commit()
            after.append((parameter.detach().clone(), transaction.update.checksum()))
        if flush_only:  # the loss was met elsewhere, and told of there
            (result,) = transaction._read(keep=1)
            processes.broken, processes.waits = True, 2
            assert result.applied and transaction.flush() == []
        else:
            with pytest.raises(ProcessError, match="process 1 no longer responds"):
                transaction.flush()
            assert transaction.flush() == []
    assert not torch.equal(after[0][0], after[1][0])  # there was something to take back
    assert torch.equal(parameter, after[0][0]) and transaction.update.checksum() == after[0][1]
    assert transaction.applied_steps == 1 and transaction.in_flight == 0


class Uncompared(ProcessGroup):
    """One of two processes, of which the other is lost between the window's sum and the comparison
    of what the step left.
    """

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def each(self, value: torch.Tensor) -> torch.Tensor:
        raise ProcessError("process 1 no longer responds")


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_could_not_be_compared_has_not_happened(late: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    processes = Uncompared(0, 2)
    transaction = window_over(
        {"p": parameter}, optimizer, 1.0, [0.1], late=late, processes=processes
    )
    before = transaction.update.checksum()

    def fill() -> Any:
        parameter.grad += torch.ones(3)
        return MicroBatch(torch.ones(()), 1)

    add_filled(transaction, fill)
    with pytest.raises(ProcessError):
        transaction.commit()
    assert torch.equal(parameter, torch.ones(3)) and transaction.update.checksum() == before
    assert transaction.applied_steps == 0
