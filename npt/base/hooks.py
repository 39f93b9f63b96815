"""The former home of `only_looks` (npt/hooks.py)."""

from npt.hooks import only_looks as only_looks
