"""`python -m deepspeed_compress.tools.tune.rank [--local_rank=N] SCRIPT ...`: end a script after some optimizer steps.

Each process of a trial runs this. It does what the processes of `ds-compress run` do. In addition, it follows the first
engine that is trained and ends the program after the number of steps in the trial's configuration. All ranks count the
same steps, so they end together. As in `ds-compress run`, no library is imported before the program imports it.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations import run
from deepspeed_compress.integrations.patching import Undo, after_import

if TYPE_CHECKING:
    from deepspeed_compress.tools.tune.recorder import EngineWatcher


def main(arguments: Sequence[str]) -> None:
    """Run the program named by `arguments`, as `integrations.run` does, until the trial is over.

    Raises:
        ConfigError: The program ended early, or DeepSpeed received a configuration other than the trial's.
    """
    watchers: list[EngineWatcher] = []
    after_import("deepspeed", partial(_watch, watchers))
    run.main(arguments)
    done, wanted = watchers[0].steps if watchers else (0, None)
    if done != wanted:
        steps = f"after {done} optimizer steps of DeepSpeed, before the {wanted or 'first'} of this trial"
        raise ConfigError(f"the script ended {steps}; let it train longer, or use fewer --steps or --rungs")


def _watch(watchers: "list[EngineWatcher]") -> Undo:
    from deepspeed_compress.tools.tune.recorder import EngineWatcher

    watchers.append(EngineWatcher())
    return watchers[0].follow()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The script was interrupted, so communication threads may still be running. A regular exit of the interpreter would
    # then crash ("terminate called without an active exception").
    os._exit(0)
