"""`python -m deepspeed_compress.services.agent.nursery DESCRIPTOR WARM [SCRIPT]`: of this process ranks are forked.

It has imported what the program imports before it does anything else, which is most of what a start takes: no
thread, no device, no file. So a fork of it is a new process that need not import. What the program imports later is
left to it, as libraries read the environment that it may have set by then (HF_HOME, HF_HUB_OFFLINE). This process is
the parent of the ranks: it ends with its agent, and they end with it.
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

from deepspeed_compress.services.agent.lines import Lines

__all__ = ["main"]

RUNNER = "deepspeed_compress.integrations.run"
_KNOWN = ("accelerate", "datasets", "deepspeed", "deepspeed_compress", "numpy", "peft", "torch", "transformers", "trl")
"""Libraries that a program imports before it does anything: imports of these have no effect but themselves."""
_LATE = (
    "deepspeed_compress.engine.initialize",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Modules that deepspeed.initialize imports, and with them the compiler of PyTorch, which reads the environment."""
_CHANGES = frozenset({"clear", "pop", "putenv", "setdefault", "update"})
"""Functions that change an environment."""
_LOOK_EVERY = 0.05
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main(descriptor: int, warm: bool, script: str) -> None:
    """Fork ranks as the agent says. In a rank, run its program: this returns when that has ended."""
    for number in _PASSED_ON:
        # They are for the ranks; the agent passes them on.
        signal.signal(number, signal.SIG_IGN)
    warm = warm and _imports(script)
    agent = Lines(socket.socket(fileno=descriptor))
    agent.say({"kind": "ready", "warm": warm})
    started = _Children(agent).serve()
    if started is None:
        # Nothing of what was imported has anything to end.
        os._exit(0)
    _become(started, warm)


def _imports(script: str) -> bool:
    """Import what ranks import; whether it is safe to fork now."""
    from deepspeed_compress.config import SECTION, parse_section
    from deepspeed_compress.integrations import run

    assert run
    # The first section builds the models that read it.
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
            # Libraries such as transformers load their parts when these are asked for.
            getattr(found, name, None)


def _statements(script: str) -> list[ast.stmt]:
    """Return the statements at the top of a program; none if it cannot be read."""
    with suppress(OSError, SyntaxError, ValueError):
        return ast.parse(Path(script).read_text(encoding="utf-8")).body
    return []


def _imported_first(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (module, names) for the imports of known libraries that a program begins with, in their order. They end at
    the first statement that does something, such as an import of its own modules, which may set the environment."""
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
    """Nothing has begun to use CUDA: a fork of a process that has may not use it, which only the fork can tell."""
    import torch

    child = os.fork()
    if not child:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Children:
    """The ranks that live, by process id, which is that of their group too."""

    def __init__(self, agent: Lines) -> None:
        self._agent = agent
        self._living: dict[int, int] = {}

    def serve(self) -> Mapping[str, Any] | None:
        """Until the agent is gone: None. In a rank that was forked: what it is to be."""
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
        """Whether this is the new process."""
        parent = os.getpid()
        # What comes before the new process takes signals as ever waits until it does.
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
        """SIGKILL is for what a rank has started too; all else for itself alone, which may still need these."""
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
                # What it has left behind, such as loaders of data.
                os.killpg(child, signal.SIGKILL)
            rank = self._living.pop(child)
            self._agent.say({"kind": "ended", "rank": rank, "status": os.waitstatus_to_exitcode(status)})


def _leave(parent: int) -> None:
    """A group of its own, signals as ever, and an end with the parent, however that ends."""
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
    """The rank: its environment, its arguments, its program."""
    os.environ.update(started["environment"])
    arguments = list(started["arguments"])
    if not warm:
        os.execv(sys.executable, [sys.executable, "-m", RUNNER, *arguments])
    # At the end everything is garbage again.
    atexit.register(gc.unfreeze)
    random.seed()
    if "numpy" in sys.modules:
        # A new process would have drawn its own.
        sys.modules["numpy"].random.seed()
    from deepspeed_compress.integrations import run

    run.main(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "warm", sys.argv[3] if len(sys.argv) > 3 else "")
