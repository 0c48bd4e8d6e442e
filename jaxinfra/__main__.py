"""``python -m jaxinfra``: the command line."""

import sys

from jaxinfra.cli.entry import main

sys.exit(main())
