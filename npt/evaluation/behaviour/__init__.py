"""A converted model as a person would try it, next to its teacher: answers to prompts, greedy
texts, figures by position, and facts found again far back. `measure.py` puts them together."""
