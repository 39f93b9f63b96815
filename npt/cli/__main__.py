"""`python -m npt.cli`."""

import sys

from npt.cli.main import main

sys.exit(main())
