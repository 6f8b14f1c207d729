"""Program of a part's process: `python -m ...part MODULE FILE TASK` writes the module's findings one by one."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from deepspeed_compress.tools.gpu_check.findings import Task

__all__ = ["main"]


def main() -> None:
    module, file, task = sys.argv[1:]
    with Path(file).open("w", encoding="utf-8") as stream:
        for finding in import_module(module).findings(Task.from_json(task)):
            stream.write(json.dumps(asdict(finding)) + "\n")
            stream.flush()


if __name__ == "__main__":
    main()
