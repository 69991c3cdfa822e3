"""``python -m stepcredit`` is the command line too."""

import sys

from stepcredit.cli import main

sys.exit(main())
