"""`python -m npt`."""

import sys

from npt.cli.main import main

sys.exit(main())
