"""``python -m kvplan``: the command line."""

import sys

from kvplan.cli import main

if __name__ == "__main__":
    sys.exit(main())
