"""`python -m crosscut` is the same as the `crosscut` command."""

import sys

from crosscut.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
