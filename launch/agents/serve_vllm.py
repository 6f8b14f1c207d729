"""The endpoint of the policy with vLLM: a server for one machine, and the process that gives it new weights."""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path

import uvicorn

from deepspeed_compress.agents.serving import make_server
from deepspeed_compress.agents.vllm_endpoint import ServerWeights, make_vllm_endpoint
from deepspeed_compress.launcher.workers import die_with
from deepspeed_compress.rollout.vllm import BACKEND, ServedEngine
from launch.agents.sums import LENGTH

NAME = "policy"


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve a policy by vLLM, with the weights that are published.")
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="model and tokenizer of transformers")
    add("--weights", required=True, metavar="PLACE", help="directory of the versions, or address of their store")
    add("--port", type=int, required=True)
    add("--vllm-port", type=int, required=True, help="port of the server")
    add("--python", default=sys.executable, metavar="FILE", help="Python with vLLM; default: this one")
    add("--seed", type=int, default=0, help="seed of sampling; default: 0")
    return parser.parse_args()


def start_server(options: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """Start vLLM. It ends with this process."""
    command = [options.python, "-m", "launch.agents.vllm_server", "--model", str(options.model)]
    command += ["--served-model-name", NAME]
    command += ["--host", "127.0.0.1", "--port", str(options.vllm_port), "--seed", str(options.seed)]
    command += ["--dtype", "float32", "--max-model-len", str(2 * LENGTH), "--enforce-eager"]
    command += ["--generation-config", "vllm"]
    command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | os.environ
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    return subprocess.Popen(command, env=environment, preexec_fn=partial(die_with, os.getpid()))


def wait_for_server(server: "subprocess.Popen[bytes]", url: str) -> None:
    """Wait until the server answers.

    Raises:
        SystemExit: it has ended.
    """
    while server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit(f"vLLM has ended with exit code {server.returncode}")


class Following(threading.Thread):
    """Thread that gives a server new weights. Its error ends the endpoint.

    Attributes:
        error: why it has ended; None if it was stopped.
    """

    def __init__(self, weights: ServerWeights, endpoint: uvicorn.Server) -> None:
        super().__init__(name="weights", daemon=True)
        self._weights, self._endpoint, self.stopped = weights, endpoint, threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._weights.follow(self.stopped)
        except Exception as error:
            self.error = error
            self._endpoint.should_exit = True


def main() -> None:
    options = parse_options()
    url, server = f"http://127.0.0.1:{options.vllm_port}", start_server(options)
    try:
        wait_for_server(server, url)
        weights = ServerWeights(ServedEngine(url), options.weights)
        app = make_vllm_endpoint(url, weights, NAME)
        endpoint = make_server(app, "127.0.0.1", options.port)
        following = Following(weights, endpoint)
        following.start()
        endpoint.run()
        following.stopped.set()
        if following.error is not None:
            raise following.error
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
