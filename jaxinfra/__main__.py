"""``python -m jaxinfra``: the command line."""

import sys

from jaxinfra.cli.main import main

sys.exit(main())
