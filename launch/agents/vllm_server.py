"""vLLM's server, none of whose processes survives the one that has started it. It takes the options of `vllm serve`."""

import os
import runpy

from deepspeed_compress.launcher.workers import die_with

if __name__ == "__mp_main__":
    # A process that vLLM spawns loads this module first.
    die_with(os.getppid())

if __name__ == "__main__":
    os.register_at_fork(after_in_child=lambda: die_with(os.getppid()))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
