"""Program of ranks that try one feature after the other. The others go on if one fails on all ranks or hangs."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

import torch.distributed as dist

from tests.gpu.feature_settings import NODES, PROGRAMS, TRAININGS
from tests.gpu.feature_training import Place, Skipped, train

_SETTINGS = {**TRAININGS, **NODES}
_NOTHING: Mapping[str, Any] = {"losses": [], "weights": "", "figure": "", "error": "", "skip": ""}


def try_features(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the result of each feature on this rank.

    Args:
        job: `features` to try, the `device` and `backend`, a `directory` that all ranks share, and the seconds of
            `patience` with a feature, after which the process ends.
    """
    place = Place(job["device"], job["backend"], job["directory"])
    group = dist.new_group(backend="gloo")
    for name in job["features"]:
        with _limited(name, job["patience"]):
            found = {"feature": name, **_NOTHING, **_timed(name, place)}
            yield found
            if "CUDA error" in found["error"]:
                # Nothing works on the GPU in this process any more.
                os._exit(1)
            # A group of its own, because messages of a feature that failed on some ranks may be left in others.
            dist.barrier(group)


def _timed(name: str, place: Place) -> Mapping[str, Any]:
    begin = time.perf_counter()
    found = _try(name, place)
    return {**found, "seconds": time.perf_counter() - begin}


def _try(name: str, place: Place) -> Mapping[str, Any]:
    try:
        return train(_SETTINGS[name], place) if name in _SETTINGS else _program(name)(place)
    except Skipped as reason:
        return {"skip": str(reason)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "error": f"{type(error).__name__}: {str(error)[:300]} ({os.path.basename(where.filename)}:{where.lineno})"
        }


def _program(name: str) -> Any:
    module, _, function = PROGRAMS[name].partition(":")
    return getattr(import_module(f"tests.gpu.{module}"), function)


@contextmanager
def _limited(name: str, seconds: float) -> Iterator[None]:
    """End this process if the block takes longer than `seconds`, and print where it is then."""
    timer = threading.Timer(seconds, _end, (name, threading.main_thread().ident))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(name: str, thread: int) -> None:
    frame: FrameType | None = sys._current_frames().get(thread)
    print(f"{name} hangs at", *traceback.format_stack(frame, 12), file=sys.stderr, flush=True)
    os._exit(1)
