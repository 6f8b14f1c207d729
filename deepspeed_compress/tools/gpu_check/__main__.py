"""Entry point of `python -m deepspeed_compress.tools.gpu_check`."""

from deepspeed_compress.tools.gpu_check.command import main

raise SystemExit(main())
