"""The code of an exported folder: nothing here imports npt, and npt imports none of it."""
