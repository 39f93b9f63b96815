"""Plant faults in real training, and judge the outcome bit for bit."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))  # for random_base
