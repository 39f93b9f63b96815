"""The checks of `debug/verify_fixes.py`, in the order in which they run."""

from fixes import form, data, training  # noqa: F401, I001
from fixes.check import CHECKS as CHECKS
