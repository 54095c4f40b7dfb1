"""`python -m tuning`, which is `rcir tune`."""

import sys

from rcir.cli import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
