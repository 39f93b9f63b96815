"""Compare clean runs in transformers' and TRL's Trainers, plain and guarded."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # for random_base

from clean_runs.by_arguments import by_arguments
from clean_runs.by_optimizer import by_optimizer
from clean_runs.by_trainer import by_trainer

EXAMPLES = [*by_arguments(), *by_optimizer(), *by_trainer()]
