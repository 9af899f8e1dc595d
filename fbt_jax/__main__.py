"""`python -m fbt_jax VERB ...`, the same as `fbt VERB ...`."""

import sys

from fbt_jax.cli import main

sys.exit(main())
