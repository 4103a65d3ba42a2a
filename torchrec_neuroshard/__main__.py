"""Makes ``python -m torchrec_neuroshard`` the command line."""

import sys

from torchrec_neuroshard.cli import main

sys.exit(main())
