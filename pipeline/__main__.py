"""`python -m pipeline`: the same as the console script `embedstream`."""

from __future__ import annotations

import sys

from pipeline.cli.commands import main

sys.exit(main())
