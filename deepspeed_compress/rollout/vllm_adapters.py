"""Published adapters in vLLM, which loads each version next to its own base.

An engine knows a version by a name such as "policy@12". Requests choose one by that name, so none is changed while it
runs, and cached keys and values of other versions stay right. An engine keeps several versions: vLLM's `max_loras` is
the number that one batch may mix.

Source: `vllm/lora/request.py` and `vllm/entrypoints/serve/lora` of vLLM 0.32.
"""

from collections import deque
from pathlib import Path
from typing import Any

from deepspeed_compress.rollout import open_store
from deepspeed_compress.rollout.adapter_export import AdapterExporter
from deepspeed_compress.rollout.vllm import post

_KEEP = 2
"""Number of versions that an engine keeps: requests of the one before may still wait."""


class ServedAdapters:
    """Adapters of a server, `vllm serve --enable-lora`, that was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.

    Args:
        url: address of the server, such as "http://10.0.0.7:8000".
        place: the published versions: a directory, or the address of a store ("tcp://host:port").
        directory: directory for exported versions, which the hosts of the server share.
        name: name of the policy. Requests name a version as their model: "policy@12".
        keep: number of versions that the server keeps.
        timeout: seconds to wait for an answer.

    Examples:
        >>> adapters = ServedAdapters("http://10.0.0.7:8000", "/shared/policy", "/shared/adapters")
        >>> model = adapters.load(12)
    """

    def __init__(
        self, url: str, place: str, directory: str, name: str = "policy", keep: int = _KEEP, timeout: float = 600.0
    ) -> None:
        self._url, self._name, self._keep, self._timeout = url.rstrip("/"), name, keep, timeout
        self._exporter = AdapterExporter(open_store(place), Path(directory).resolve())
        self._loaded = deque[str]()

    def load(self, version: int) -> str:
        """Let the server load a version, and forget old ones. Return the name by which requests choose it.

        Raises:
            RolloutError: the version cannot be reached, or the server refuses it.
            OSError: the server does not answer.
        """
        model = f"{self._name}@{version}"
        if model not in self._loaded:
            self._exporter.update(version)
            # A trainer that was restarted may load a version again.
            place = str(self._exporter.place(version))
            self._post("load", {"lora_name": model, "lora_path": place, "load_inplace": True})
            self._loaded.append(model)
        while len(self._loaded) > self._keep:
            self._post("unload", {"lora_name": self._loaded.popleft()})
        return model

    def _post(self, verb: str, body: dict[str, Any]) -> None:
        hint = "start the server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        post(f"{self._url}/v1/{verb}_lora_adapter", body, self._timeout, hint)


class LocalAdapters:
    """Adapters of a `vllm.LLM(..., enable_lora=True)` in this process.

    Args:
        llm: the engine.
        place: the published versions: a directory, or the address of a store ("tcp://host:port").
        directory: directory for exported versions, which the hosts of the engine's workers share.
        name: name of the policy.
        keep: number of versions that the engine keeps.

    Examples:
        >>> adapters = LocalAdapters(llm, "/shared/policy", "/shared/adapters")
        >>> llm.generate(prompts, lora_request=adapters.load(12))
    """

    def __init__(self, llm: Any, place: str, directory: str, name: str = "policy", keep: int = _KEEP) -> None:
        self._llm, self._name, self._keep = llm, name, keep
        self._exporter = AdapterExporter(open_store(place), Path(directory).resolve())
        self._loaded = deque[Any]()

    def load(self, version: int) -> Any:
        """Load a version, and forget old ones. Return the `LoRARequest` by which requests choose it.

        Raises:
            RolloutError: the version cannot be reached.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"{self._name}@{version}", version, str(self._exporter.place(version)))
        if request not in self._loaded:
            self._exporter.update(version)
            self._llm.llm_engine.add_lora(request)
            self._loaded.append(request)
        while len(self._loaded) > self._keep:
            self._llm.llm_engine.remove_lora(self._loaded.popleft().lora_int_id)
        return request
