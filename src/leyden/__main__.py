"""`python -m leyden`, if the `leyden` script is not on the path."""

import sys

from leyden.cli import main

sys.exit(main())
