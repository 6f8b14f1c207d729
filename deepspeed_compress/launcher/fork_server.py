"""`python -m deepspeed_compress.launcher.fork_server DESCRIPTOR WARM [SCRIPT]`: fork server for ranks.

It imports what the program imports before it does anything else, which is most of the startup time: no thread, no
device, no file. A fork of it is a new process that need not import again. Later imports are left to the program,
because libraries read the environment that it may have set by then (HF_HOME, HF_HUB_OFFLINE). This process is the
parent of the ranks: it ends with its agent, and they end with it.
"""

import ast
import atexit
import ctypes
import gc
import importlib
import os
import random
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepspeed_compress.launcher.fork_server_messages import Lines

__all__ = ["main"]

RUNNER = "deepspeed_compress.integrations.run"
_KNOWN = ("accelerate", "datasets", "deepspeed", "deepspeed_compress", "numpy", "peft", "torch", "transformers", "trl")
"""Libraries that a program imports before it does anything; importing them has no other effect."""
_LATE = (
    "deepspeed_compress.backends.deepspeed.initialize",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Modules that deepspeed.initialize imports, and with them the compiler of PyTorch, which reads the environment."""
_CHANGES = frozenset({"clear", "pop", "putenv", "setdefault", "update"})
"""Methods and functions that change an environment."""
_LOOK_EVERY = 0.05
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main(descriptor: int, warm: bool, script: str) -> None:
    """Fork ranks as the agent requests. In a rank, run its program, and return when that has ended."""
    for number in _PASSED_ON:
        # They are meant for the ranks; the agent passes them on.
        signal.signal(number, signal.SIG_IGN)
    warm = warm and _imports(script)
    agent = Lines(socket.socket(fileno=descriptor))
    agent.say({"kind": "ready", "warm": warm})
    started = _Children(agent).serve()
    if started is None:
        # None of the imported modules has anything to clean up.
        os._exit(0)
    _become(started, warm)


def _imports(script: str) -> bool:
    """Import what ranks import. Return True if it is safe to fork now."""
    from deepspeed_compress.config import SECTION, parse_section
    from deepspeed_compress.integrations import run

    assert run
    # Parsing a first section builds the pydantic models.
    parse_section({SECTION: {}})
    body = _statements(script)
    for module, names in _imported_first(body):
        _import(module, names)
    if "deepspeed" in sys.modules and not any(map(_sets_environment, body)):
        for module in _LATE:
            _import(module)
    gc.collect()
    gc.freeze()
    return "torch" not in sys.modules or _may_fork()


def _import(module: str, names: Sequence[str] = ()) -> None:
    with suppress(Exception):
        found = importlib.import_module(module)
        for name in names:
            # Libraries such as transformers load submodules on first access.
            getattr(found, name, None)


def _statements(script: str) -> list[ast.stmt]:
    """Return the top-level statements of a program; none if it cannot be read."""
    with suppress(OSError, SyntaxError, ValueError):
        return ast.parse(Path(script).read_text(encoding="utf-8")).body
    return []


def _imported_first(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (module, names) for the imports of known libraries with which a program begins, in order.

    They end at the first statement that does anything else, such as an import of the program's own modules, which may
    set the environment.
    """
    for node in body[1 if _is_docstring(body[:1]) else 0 :]:
        found = list(_modules(node))
        if not found or not all(_is_known(module) or _is_standard(module) for module, _ in found):
            return
        yield from (one for one in found if _is_known(one[0]))


def _is_docstring(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def _modules(node: ast.stmt) -> Iterator[tuple[str, Sequence[str]]]:
    if isinstance(node, ast.Import):
        yield from ((one.name, ()) for one in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module, [one.name for one in node.names]


def _sets_environment(node: ast.AST) -> bool:
    """Return True if something in `node` writes to `os.environ`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Subscript) and not isinstance(one.ctx, ast.Load) and _is_environment(one.value):
            return True
        if isinstance(one, ast.Attribute) and (
            one.attr == "putenv" or (one.attr in _CHANGES and _is_environment(one.value))
        ):
            return True
    return False


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] == "environ"


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _may_fork() -> bool:
    """Return True if nothing has begun to use CUDA.

    A fork of a process that has used CUDA may not use it, and only the fork can find out.
    """
    import torch

    child = os.fork()
    if not child:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Children:
    """Living ranks, by process id, which is also the id of their process group."""

    def __init__(self, agent: Lines) -> None:
        self._agent = agent
        self._living: dict[int, int] = {}

    def serve(self) -> Mapping[str, Any] | None:
        """Serve until the agent is gone, and return None. In a forked rank, return its start message."""
        while True:
            try:
                messages = self._agent.hear(_LOOK_EVERY)
            except EOFError:
                self._signal(signal.SIGKILL)
                return None
            for message in messages:
                if message["kind"] == "signal":
                    self._signal(message["number"], message["ranks"])
                elif self._start(message):
                    return message
            self._reap()

    def _start(self, message: Mapping[str, Any]) -> bool:
        """Fork a rank. Return True in the new process."""
        parent = os.getpid()
        # Signals that arrive before the new process has its default handlers are held back until then.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            self._living[child] = message["rank"]
            self._agent.say({"kind": "started", "rank": message["rank"], "pid": child})
            return False
        self._agent.close()
        _leave(parent)
        return True

    def _signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send signal `number` to `ranks`, or to all if None.

        SIGKILL also goes to the processes that a rank has started. Other signals go to the rank alone, which may still
        need those.
        """
        send = os.killpg if number == signal.SIGKILL else os.kill
        for child, rank in self._living.items():
            if ranks is None or rank in ranks:
                with suppress(OSError):
                    send(child, number)

    def _reap(self) -> None:
        while self._living:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            with suppress(OSError):
                # Processes that it left behind, such as data loader workers.
                os.killpg(child, signal.SIGKILL)
            rank = self._living.pop(child)
            self._agent.say({"kind": "ended", "rank": rank, "status": os.waitstatus_to_exitcode(status)})


def _leave(parent: int) -> None:
    """Become a session of its own with default signal handlers, and die with the parent however it ends."""
    os.setsid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in _PASSED_ON:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _become(started: Mapping[str, Any], warm: bool) -> None:
    """Become the rank: set its environment and arguments, and run its program."""
    os.environ.update(started["environment"])
    arguments = list(started["arguments"])
    if not warm:
        os.execv(sys.executable, [sys.executable, "-m", RUNNER, *arguments])
    # At exit, all objects may be collected again.
    atexit.register(gc.unfreeze)
    random.seed()
    if "numpy" in sys.modules:
        # A new process would have its own random state.
        sys.modules["numpy"].random.seed()
    from deepspeed_compress.integrations import run

    run.main(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "warm", sys.argv[3] if len(sys.argv) > 3 else "")
