"""`python -m stoker`: the command line."""

import sys

from stoker.cli.main import main

sys.exit(main())
