"""The names that a user of the guard imports."""

from __future__ import annotations

import npt
import npt.guard
from npt import errors


def test_the_error_of_too_many_refusals_is_at_hand_to_be_caught() -> None:
    assert npt.TooManyRefusalsError is errors.TooManyRefusalsError
    assert npt.guard.TooManyRefusalsError is errors.TooManyRefusalsError
