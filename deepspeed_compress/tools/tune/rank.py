"""`python -m deepspeed_compress.tools.tune.rank [--local_rank=N] SCRIPT ...`: ends after some optimizer steps.

What the processes of a trial do: what those of `ds-compress run` do, and besides they follow the first engine that is
trained, and end the program when it has made the steps that its configuration asks for. All ranks count the same steps,
so they end together. As there, no library is imported before the program does it.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations import run
from deepspeed_compress.integrations.importing import Undo, after_import

if TYPE_CHECKING:
    from deepspeed_compress.tools.tune.recorder import EngineWatcher

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Run the program that `arguments` name, as `integrations.run` does, until the trial is over.

    Raises ConfigError when the program ends before, or DeepSpeed gets another configuration than the trial's.
    """
    watchers: list[EngineWatcher] = []
    after_import("deepspeed", partial(_watch, watchers))
    run.main(arguments)
    done, wanted = watchers[0].steps if watchers else (0, None)
    if done != wanted:
        raise ConfigError(
            f"the script ended after {done} optimizer steps of DeepSpeed, before the {wanted or 'first'} of this trial "
            "(allowed: more, the trial ends it). Let it train longer, or write fewer --steps or --rungs."
        )


def _watch(watchers: "list[EngineWatcher]") -> Undo:
    from deepspeed_compress.tools.tune.recorder import EngineWatcher

    watchers.append(EngineWatcher())
    return watchers[0].follow()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The script was left in the middle: threads of its communication may still run, and an ordinary end of the
    # interpreter would make a crash of that ("terminate called without an active exception").
    os._exit(0)
