#!/usr/bin/env python
"""Equivalence pre-training of NPT adapters: a base model in, a student that behaves as the base
out.

    python pretrain_npt_safe.py --use_quantization         the embedded model, on two cores
    python pretrain_npt_safe.py --help                     every flag
    python pretrain_npt_safe.py --config run.yaml --learning_rate 1e-4    flags win over the file

The same as `npt pretrain`.
"""

import sys

from npt.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]], prog="pretrain_npt_safe.py"))
