"""Tiny training runs with a bad batch, under anybody's guard, compared with the run without it."""
