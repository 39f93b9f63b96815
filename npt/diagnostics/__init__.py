"""Observers of a model in training. They record tensors and change nothing.

Public names are imported on first use, so that importing the package is fast.
"""

from npt.extras import PublicNames

_NAMES = PublicNames(__name__, __file__)

__all__ = sorted(_NAMES.homes)
__getattr__ = _NAMES.read
__dir__ = _NAMES.listed
