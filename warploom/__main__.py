"""`python -m warploom` is the command `warploom`."""

import sys

from warploom.cli import main

sys.exit(main())
