"""Clean training runs in transformers' and TRL's Trainers, plain and guarded, compared."""

from clean_runs.by_arguments import by_arguments
from clean_runs.by_optimizer import by_optimizer
from clean_runs.by_trainer import by_trainer

EXAMPLES = [*by_arguments(), *by_optimizer(), *by_trainer()]
