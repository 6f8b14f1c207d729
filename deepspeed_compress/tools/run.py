"""`ds-compress run`: start an unmodified training script with compression installed.

With `--restarts`, this host's agent runs here, and also the job's supervisor on the host with its address.
"""

import argparse
import functools
import hashlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed_compress.config import parse_section, read_ds_config
from deepspeed_compress.config.numbers import seconds
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations.install import INHERIT
from deepspeed_compress.integrations.launch import (
    check_configurations,
    find_configurations,
    find_program,
    find_uncompressed,
    launch_command,
    program_command,
)
from deepspeed_compress.launcher.host import Agent
from deepspeed_compress.launcher.host_resources import job_directory
from deepspeed_compress.launcher.placement import JobOptions, size_problem
from deepspeed_compress.launcher.supervisor import Supervisor
from deepspeed_compress.launcher.workers import Workers
from deepspeed_compress.transport.client import parse_address
from deepspeed_compress.transport.credentials import Credentials, pass_on, set_tls
from deepspeed_compress.transport.machine_server import MachineServer


def run(options: argparse.Namespace) -> int:
    """Replace this process by the launcher, or run the agent of this host and return the job's exit code.

    Raises:
        ConfigError: An option, the section or the script is invalid.
    """
    # This command may itself run under another `ds-compress run`, whose section must not apply to the launcher.
    os.environ.pop(INHERIT, None)
    own = [] if options.section is None else [f"--section={options.section.resolve()}"]
    if options.section is not None:
        # Report an invalid section only once, not in every process.
        parse_section(read_ds_config(options.section))
    agent, arguments = uses_agent(options), options.arguments[1:]
    set_tls(os.environ, options.tls_certificate, options.tls_authority)
    pass_on(os.environ)
    command = _command(options, arguments, agent, own)
    check_configurations(arguments, options.allow_uncompressed)
    for text in find_uncompressed(arguments):
        print(f"ds-compress: warning: {text}", file=sys.stderr, flush=True)
    if agent:
        return _run_agent(options, command)
    # The launcher replaces this process, so signals and exit codes need not be forwarded.
    return os.execv(command[0], command)


_WITHOUT_LAUNCHER = ("deepspeed", "none")
"""Values of `--launcher`, the default and none, with which a program starts its ranks itself."""
_LAUNCHERS = {("deepspeed",): "deepspeed", ("torchrun",): "torchrun", ("accelerate", "launch"): "accelerate"}
"""Programs that are launchers, as words of a command. Their processes on other hosts inherit nothing, so the runner is
put in front of the script."""


def _command(options: argparse.Namespace, arguments: Sequence[str], agent: bool, own: Sequence[str]) -> list[str]:
    """Return the command of a launcher, or of a program that starts its ranks itself."""
    program = find_program(arguments) if options.launcher in _WITHOUT_LAUNCHER else None
    if program is None:
        return launch_command("none" if agent else options.launcher, arguments, own=own)
    if agent:
        raise ConfigError(f"--restarts: {arguments[0]} starts its ranks itself; leave --restarts out")
    for words, launcher in _LAUNCHERS.items():
        if (Path(program).name, *arguments[1 : len(words)]) == words:
            return launch_command(launcher, arguments[len(words) :], own=own)
    return program_command(program, arguments[1:], own)


_AGENT_OPTIONS: Mapping[str, object] = {
    "ranks": None, "hosts": 1, "spares": 0, "rendezvous": None, "hang": "10 min", "grace": "30 s", "wait": "10 min"
}  # fmt: skip
"""Options that require `--restarts`, with their defaults."""


def uses_agent(options: argparse.Namespace) -> bool:
    """Return True if `--restarts` is given, so that an agent starts the ranks.

    Raises:
        ConfigError: An option that requires `--restarts` is given without it, or one that it requires is missing.
    """
    given = [name for name, default in _AGENT_OPTIONS.items() if getattr(options, name) != default]
    if options.restarts is None:
        if given:
            raise ConfigError(f"--{given[0]}: has no effect without --restarts; write --restarts N, or leave it out")
        return False
    if options.launcher != "deepspeed":
        raise ConfigError(f"--launcher {options.launcher}: has no effect with --restarts; leave one of them out")
    if options.ranks is None:
        raise ConfigError("--ranks: is missing; write the number of ranks on each host")
    if options.rendezvous is None and options.hosts > 1:
        raise ConfigError(f"--hosts {options.hosts}: several hosts need an address; write --rendezvous HOST:PORT")
    if options.rendezvous is None and options.spares:
        raise ConfigError(f"--spares {options.spares}: spares are hosts; write --rendezvous HOST:PORT, or leave it out")
    return True


def _run_agent(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Run the agent and return the exit code of the job. `command` runs the program in one process."""
    job = JobOptions(
        _job(options, command[3:]), options.hosts, options.ranks, options.restarts, _seconds(options, "hang"),
        _seconds(options, "wait"),
    )  # fmt: skip
    grace = _seconds(options, "grace")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    file: Path | None = next(find_configurations(options.arguments), None)
    ds_config = None if file is None else read_ds_config(file)
    supervisor = Supervisor(job, functools.partial(size_problem, ds_config), _log)
    # A single host communicates only with itself, so it needs no shared secret.
    credentials = Credentials.of_this_process() if options.rendezvous is None else Credentials.find()
    with job_directory() as directory, _served(supervisor, options.rendezvous, credentials) as address:
        return Agent(address, job.id, job.ranks, grace, Workers(command), directory, _log, credentials).run()


def _seconds(options: argparse.Namespace, name: str) -> float:
    try:
        return seconds(getattr(options, name))
    except ValueError as error:
        raise ConfigError(f"--{name}: {error}") from error


def _job(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Return the job's id: on several hosts, the same for the same command; on a single host, a unique one."""
    if options.rendezvous is None:
        return os.urandom(6).hex()
    identity = [options.hosts, options.ranks, options.spares, options.restarts, *arguments]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:12]


@contextmanager
def _served(supervisor: Supervisor, rendezvous: str | None, credentials: Credentials) -> Iterator[tuple[str, int]]:
    """Yield the address of the supervisor, and run it in this process if the address is this host's and still free."""
    try:
        host, port = ("127.0.0.1", 0) if rendezvous is None else parse_address(rendezvous)
    except ValueError as error:
        raise ConfigError(f"--rendezvous: {error}") from error
    listen_address, server = _listen_address(host), None
    # It is not served here if it is that of another host, or if another agent of this host serves it.
    with suppress(OSError):
        server = MachineServer(supervisor, None, listen_address, port, _log, credentials)
    if server is None:
        yield host, port
        return
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield host, server.port
    finally:
        server.stop()
        thread.join()


def _listen_address(host: str) -> str:
    """Return the address to listen on: `host`, or "" (all) if the host resolves its own name to a loopback address."""
    try:
        known = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"--rendezvous {host}: {error}; write the address of one of the hosts") from error
    return "" if known.startswith("127.") and known != host and host != "localhost" else host


def _log(text: str) -> None:
    print(f"ds-compress: {text}", file=sys.stderr, flush=True)
