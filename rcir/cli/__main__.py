"""`python -m rcir.cli`, where the script `rcir` is not on the path."""

import sys

from rcir.cli import main

sys.exit(main())
