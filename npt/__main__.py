"""`npt` and `python -m npt`."""

import sys
from collections.abc import Sequence

from npt.errors import ConfigError
from npt.extras import require_extra


def main(argv: Sequence[str] | None = None, prog: str = "npt") -> int:
    """Run the command line and return the exit status; without the packages that it needs, name
    the extra in one line.
    """
    try:
        require_extra("distill", "the command line")
    except ConfigError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    from npt.cli.main import main as run

    return run(argv, prog)


if __name__ == "__main__":
    sys.exit(main())
