"""All examples, in one list."""

from __future__ import annotations

from clean_runs.by_arguments import by_arguments
from clean_runs.by_optimizer import by_optimizer
from clean_runs.by_trainer import by_trainer
from clean_runs.watched import Example

EXAMPLES: list[Example] = [*by_arguments(), *by_optimizer(), *by_trainer()]
