"""`python -m massl` is the `massl` command; torchrun needs it as a module."""

import sys

from massl.cli import main

sys.exit(main())
