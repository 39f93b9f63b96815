"""The code that an exported folder carries. It stands for itself: nothing here imports npt, and npt
imports none of it.
"""
