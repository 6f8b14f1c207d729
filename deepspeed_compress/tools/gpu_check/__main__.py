from deepspeed_compress.tools.gpu_check.command import main

raise SystemExit(main())
