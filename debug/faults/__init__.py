"""Faults planted in real training; what becomes of them is judged bit for bit."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # of random_base
