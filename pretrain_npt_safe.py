#!/usr/bin/env python
"""Distil NPT adapters: train a student to predict what its base model predicts.

    python pretrain_npt_safe.py --use_quantization     the embedded model, on two CPU cores
    python pretrain_npt_safe.py --help                 all flags
    python pretrain_npt_safe.py --config run.yaml --learning_rate 1e-4    flags override the file

It is the same as `npt pretrain`.
"""

import sys

from npt.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["pretrain", *sys.argv[1:]], prog="pretrain_npt_safe.py"))
