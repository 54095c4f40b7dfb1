"""`python -m calibration`, which is `rcir calibrate`."""

import sys

from rcir.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
