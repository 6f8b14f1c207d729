"""Published weights in vLLM: its plugin, and control of an engine that loads them.

The package registers the weight transfer backend "deepspeed_compress" in every process of vLLM, by the entry point
`vllm.general_plugins`. Each worker of an engine with this backend pulls versions from a store (see `vllm_worker`). What
remains for the trainer, or a program next to the engine, is to tell it the store, and then each version.

Source: `vllm/distributed/weight_transfer` of vLLM 0.28 to 0.32, and the routes in `vllm/entrypoints/rl`.
"""

import json
import urllib.error
import urllib.request
from typing import Any, Literal, Protocol

from deepspeed_compress.errors import RolloutError

BACKEND = "deepspeed_compress"
"""Name of the backend in vLLM's `WeightTransferConfig`."""
_MODULES = "deepspeed_compress.rollout"


class WeightControl(Protocol):
    """Control of the weights of an engine: vLLM's `VLLMWeightSyncClient`."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def register() -> None:
    """Make the backend known to vLLM, which calls this in each of its processes, and again in forks of them."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{_MODULES}.vllm_worker", "PublishedWeightsEngine")
        WeightTransferTrainerFactory.register_engine(BACKEND, f"{_MODULES}.vllm_trainer", "PublishingTrainerEngine")


def follow_weights(engine: WeightControl, place: str) -> None:
    """Let all workers of an engine follow the versions at `place`, as their hosts see it.

    Args:
        engine: a `LocalEngine`, a `ServedEngine`, or one of vLLM's own clients.
        place: a directory, or the address of a store ("tcp://host:port").
    """
    engine.init_weight_transfer_engine({"place": place})


def load_version(engine: WeightControl, version: int) -> None:
    """Let all workers of an engine load a version, and label the answers that follow with its number.

    The workers wait up to two minutes for the version, because a network file system may show new files late.
    """
    engine.start_weight_update()
    engine.update_weights({"version": version})
    engine.finish_weight_update(str(version))


class LocalEngine:
    """Control of the weights of a `vllm.LLM` in this process, between its requests.

    Examples:
        >>> llm = vllm.LLM("model", weight_transfer_config={"backend": "deepspeed_compress"})
        >>> engine = LocalEngine(llm)
        >>> follow_weights(engine, "/shared/policy")
        >>> load_version(engine, 12)
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish the update and forget the keys and values that older weights have computed.

        Raises:
            RolloutError: requests run, whose keys and values cannot be forgotten.
        """
        self._llm.finish_weight_update(weight_version)
        if not self._llm.reset_prefix_cache():
            raise RolloutError("the cache has keys of older weights, because requests run: wait for them first")


class ServedEngine:
    """Control of the weights of a server, `vllm serve`, that was started with VLLM_SERVER_DEV_MODE=1.

    Requests are paused during an update. If an update fails, the server stays paused, because its weights may be of two
    versions: restart it.

    Args:
        url: address of the server, such as "http://10.0.0.7:8000".
        running: what happens to running requests: `wait` lets them end before the update, `keep` freezes them and
            continues with the new weights, and `abort` ends them.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, url: str, running: Literal["wait", "keep", "abort"] = "wait", timeout: float = 600.0) -> None:
        self._url, self._running, self._timeout = url.rstrip("/"), running, timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Pause requests, forget the keys and values of older weights, and begin an update."""
        self._post(f"pause?mode={self._running}")
        self._post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})
        self._post("reset_prefix_cache?reset_running_requests=true")
        self._post("resume")

    def _post(self, route: str, body: dict[str, Any] | None = None) -> None:
        post(f"{self._url}/{route}", body or {}, self._timeout, "start it with VLLM_SERVER_DEV_MODE=1")


def post(url: str, body: dict[str, Any], timeout: float, hint: str) -> None:
    """Send a request to one of a server's routes.

    Args:
        url: address of the route.
        body: body of the request.
        timeout: seconds to wait for an answer.
        hint: what to do if the server has no such route.

    Raises:
        RolloutError: it answers with an error.
        OSError: it does not answer.
    """
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        why = error.read(2000).decode(errors="replace")
        advice = f"; {hint}" if error.code == 404 else ""
        raise RolloutError(f"{url} has failed with status {error.code}{advice}: {why}") from error
