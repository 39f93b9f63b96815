"""Watching the numbers of a model in training: what is found is said, nothing is steered."""
