"""`python -m training`, which is `rcir train`."""

import sys

from rcir.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
