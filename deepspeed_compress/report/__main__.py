"""``python -m deepspeed_compress.report``."""

import sys

from deepspeed_compress.report import main

sys.exit(main())
