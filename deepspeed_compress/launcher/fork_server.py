"""`python -m deepspeed_compress.launcher.fork_server DESCRIPTOR WARM [SCRIPT]`: fork server for ranks.

It makes the imports with which the program begins, which take most of the startup time, and starts no thread, uses no
device and opens no file. Its forks are new processes that need not import again. Later imports are left to the program,
because it may first set environment variables that libraries read, such as HF_HOME. This process is the parent of the
ranks: it ends with its agent, and they end with it.
"""

import ast
import atexit
import ctypes
import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RUNNER = "deepspeed_compress.integrations.run"
_PRELOADED = (
    "accelerate",
    "datasets",
    "deepspeed",
    "deepspeed_compress",
    "numpy",
    "peft",
    "torch",
    "transformers",
    "trl",
)
"""Libraries that the server imports if the program begins with them. Importing them has no other effect."""
_INITIALIZE_IMPORTS = (
    "deepspeed_compress.backends.deepspeed.initialize",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Modules that deepspeed.initialize imports. They import the compiler of PyTorch, which reads the environment."""
_CHANGING_CALLS = frozenset({"clear", "pop", "putenv", "setdefault", "update"})
"""Methods of os.environ, and functions, that change the environment."""
_POLL_INTERVAL = 0.05
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
"""Operation of prctl(2) that sends a signal to a process when its parent dies."""


def main(descriptor: int, warm: bool, script: str) -> None:
    """Fork ranks at the agent's request. In a rank, run its program, and return when it has ended."""
    for number in _FORWARDED_SIGNALS:
        # These signals are for the ranks, and the agent forwards them.
        signal.signal(number, signal.SIG_IGN)
    warm = warm and _preload(script)
    started = _Children(Connection(descriptor)).serve()
    if started is None:
        # Exit at once: none of the imported modules has to clean up.
        os._exit(0)
    _run_rank(started, warm)


def _preload(script: str) -> bool:
    """Make the imports of the ranks. Return True if it is safe to fork after that."""
    from deepspeed_compress.config import SECTION, parse_section
    from deepspeed_compress.integrations import run

    assert run
    # Parsing the first section builds the pydantic models, which takes time.
    parse_section({SECTION: {}})
    body = _statements(script)
    for module, names in _leading_imports(body):
        _import(module, names)
    if "deepspeed" in sys.modules and not any(map(_sets_environment, body)):
        for module in _INITIALIZE_IMPORTS:
            _import(module)
    gc.collect()
    gc.freeze()
    return "torch" not in sys.modules or _is_safe_to_fork()


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


def _leading_imports(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield (module, names) for each preloaded library that the program imports before it does anything else.

    The imports end at the first other statement, even an import of the program's own modules, which may set the
    environment.
    """
    for node in body[1 if _is_docstring(body[:1]) else 0 :]:
        found = list(_modules(node))
        if not found or not all(_is_preloaded(module) or _is_standard(module) for module, _ in found):
            return
        yield from (one for one in found if _is_preloaded(one[0]))


def _is_docstring(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def _modules(node: ast.stmt) -> Iterator[tuple[str, Sequence[str]]]:
    if isinstance(node, ast.Import):
        yield from ((one.name, ()) for one in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module, [one.name for one in node.names]


def _sets_environment(node: ast.AST) -> bool:
    """Return True if any code in `node` writes to `os.environ`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Subscript) and not isinstance(one.ctx, ast.Load) and _is_environment(one.value):
            return True
        if isinstance(one, ast.Attribute) and (
            one.attr == "putenv" or (one.attr in _CHANGING_CALLS and _is_environment(one.value))
        ):
            return True
    return False


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] == "environ"


def _is_preloaded(module: str) -> bool:
    return module.partition(".")[0] in _PRELOADED


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_safe_to_fork() -> bool:
    """Return True if this process has not used CUDA.

    A fork of a process that has used CUDA cannot use it, and only the fork itself can tell.
    """
    import torch

    child = os.fork()
    if not child:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Children:
    """Living ranks by process id, which is also the id of the rank's process group."""

    def __init__(self, agent: Connection) -> None:
        self._agent = agent
        self._living: dict[int, int] = {}

    def serve(self) -> Mapping[str, Any] | None:
        """Serve until the agent is gone, and return None. In a forked rank, return the message that started it."""
        while True:
            try:
                self._reap()
                message: Mapping[str, Any] = self._agent.recv() if self._agent.poll(_POLL_INTERVAL) else {}
            except (EOFError, OSError):
                self._signal(signal.SIGKILL)
                return None
            if "number" in message:
                self._signal(message["number"], message["ranks"])
            elif message and self._start(message):
                return message

    def _start(self, message: Mapping[str, Any]) -> bool:
        """Fork a rank. Return True in the new process."""
        parent = os.getpid()
        # Block signals until the new process has its default handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_SIGNALS)
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED_SIGNALS)
            self._living[child] = message["rank"]
            return False
        self._agent.close()
        _detach(parent)
        return True

    def _signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send signal `number` to `ranks`, or to all if None.

        SIGKILL also goes to the processes that a rank has started. Other signals go only to the rank, which may still
        need these processes to end properly.
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
            rank = self._living.pop(child, None)
            if rank is None:
                # An imported library has started this process.
                continue
            with suppress(OSError):
                # The rank may leave processes behind, such as data loader workers.
                os.killpg(child, signal.SIGKILL)
            self._agent.send((rank, os.waitstatus_to_exitcode(status)))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, whose process id is `parent`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _detach(parent: int) -> None:
    """Start a new session with default signal handlers, in a process that dies with its parent."""
    os.setsid()
    die_with(parent)
    for number in _FORWARDED_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED_SIGNALS)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _run_rank(started: Mapping[str, Any], warm: bool) -> None:
    """Set the environment of the rank, and run its program."""
    os.environ.update(started["environment"])
    arguments = list(started["arguments"])
    if not warm:
        os.execv(sys.executable, [sys.executable, "-m", RUNNER, *arguments])
    # At exit, all objects may be collected again.
    atexit.register(gc.unfreeze)
    random.seed()
    if "numpy" in sys.modules:
        # Every new process has its own random state, so a fork must not share one.
        sys.modules["numpy"].random.seed()
    from deepspeed_compress.integrations import run

    run.main(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "warm", sys.argv[3] if len(sys.argv) > 3 else "")
