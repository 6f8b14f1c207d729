"""A store at an HTTP server, for ranks and receivers without a shared file system.

Requests and answers are signed with the shared secret (see `signatures`), so a body that arrives damaged is noticed and
requested again. The server is in `store_server`.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hmac import compare_digest

from deepspeed_compress.errors import ConfigError, install_command
from deepspeed_compress.rollout.signatures import SIGNATURE, Stamp
from deepspeed_compress.rollout.store import LARGEST, check_name
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError

try:
    import httpx
except ModuleNotFoundError as error:
    raise ImportError(
        f"a store at an address needs httpx, which this environment does not have; write: {install_command('http')}"
    ) from error

_CONNECT = 10.0
"""Most seconds to wait for a connection: a host that is gone does not refuse any."""
_FIRST_PAUSE = 0.25
"""Seconds before the second attempt. Each later pause is twice as long."""
_REFUSALS = 2
"""Number of refusals that prove that the secret is wrong."""
_PATIENCE = 600.0
"""Seconds after which an answer is given up, however slowly it arrives."""
_RETRIED = (422, 503)
"""Status of a body that arrived damaged, and of a server that is busy."""


class _DamagedAnswerError(OSError):
    """Answer without a valid signature, with too many bytes, or with too few in a long time."""


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")[:1000]


class ServedStore:
    """Store at a `StoreServer`. Threads may share it.

    A request that fails on the way is repeated, with growing pauses. This changes nothing if an earlier attempt was
    carried out.

    Args:
        address: "http://host:port" of the server, or "https://host:port" with TLS.
        credentials: credentials of this side; None for those that the environment and the user's files name.
        timeout: seconds to wait for any progress of a request, and for a connection if that is less than 10.
        attempts: number of times that a request is sent. Six attempts take 8 seconds if the server refuses connections.

    Raises:
        ConfigError: the address is malformed, or TLS is configured and the address is not https.
    """

    def __init__(
        self, address: str, credentials: Credentials | None = None, timeout: float = 60.0, attempts: int = 6
    ) -> None:
        credentials = credentials or Credentials.find()
        self._address, self._secret, self._attempts = address, credentials.secret, attempts
        _check_address(address, credentials)
        verify = True if credentials.tls is None else credentials.tls.client
        waits = httpx.Timeout(timeout, connect=min(timeout, _CONNECT))
        # The variables of the environment name proxies for the internet, which do not reach a cluster's own hosts.
        self._client = httpx.Client(base_url=address, verify=verify, timeout=waits, trust_env=False)

    def put(self, name: str, data: bytes) -> None:
        if len(data) > LARGEST:
            raise OSError(f"{name} has {len(data)} bytes (allowed: {LARGEST})")
        self._request("PUT", name, data)

    def get(self, name: str) -> bytes:
        return self._request("GET", name)

    def names(self) -> Sequence[str]:
        return [str(name) for name in json.loads(self._request("GET"))]

    def delete(self, name: str) -> None:
        self._request("DELETE", name)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _request(self, method: str, name: str = "", body: bytes = b"") -> bytes:
        if name:
            check_name(name)
        problem, refusals = "", 0
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                answer = self._exchange(method, name, body)
            except AuthenticationError as error:
                # A digit of a right signature may have been damaged, but not twice in a row.
                refusals += 1
                if refusals == min(_REFUSALS, self._attempts):
                    raise
                problem = str(error)
                continue
            except (httpx.TransportError, _DamagedAnswerError) as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status not in _RETRIED:
                return self._result(answer, name)
            problem = answer.text
        raise ConnectionError(f"the store at {self._address} has failed {self._attempts} times; last: {problem}")

    def _exchange(self, method: str, name: str, body: bytes) -> _Answer:
        """Send a signed request, and return its answer. Only a refusal by the server may lack a signature."""
        stamp = Stamp.new(method, name, body)
        headers = stamp.headers(self._secret.key)
        with self._client.stream(method, f"/blobs/{name}", content=body, headers=headers) as response:
            answer = _Answer(response.status_code, b"".join(_bounded(response.iter_raw())))
            signature = response.headers.get(SIGNATURE, "")
        expected = stamp.sign_answer(self._secret.key, answer.status, hashlib.sha256(answer.body).hexdigest())
        if not compare_digest(signature.encode(), expected.encode()):
            if answer.status == httpx.codes.UNAUTHORIZED:
                raise AuthenticationError(
                    f"the store at {self._address} has refused a request: {answer.text} (the secret of this side is "
                    f"from {self._secret.source})"
                )
            raise _DamagedAnswerError(f"the signature of an answer with the status {answer.status} is wrong")
        return answer

    def _result(self, answer: _Answer, name: str) -> bytes:
        if answer.status == httpx.codes.NOT_FOUND:
            raise KeyError(name)
        if answer.status != httpx.codes.OK:
            raise OSError(f"the store at {self._address} has failed: {answer.text}")
        return answer.body


def _check_address(address: str, credentials: Credentials) -> None:
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f'{address!r} is not the address of a store ({error}); write "http://host:port"') from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(
            f'{address!r} is not the address of a store (allowed: "http://host:port", "https://host:port")'
        )
    if credentials.tls is not None and url.scheme != "https":
        raise ConfigError(f'{address!r} does not use TLS, which is configured; write "https://{url.netloc.decode()}"')


def _bounded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    size, until = 0, time.monotonic() + _PATIENCE
    for chunk in chunks:
        size += len(chunk)
        if size > LARGEST:
            raise _DamagedAnswerError(f"an answer has more than {LARGEST} bytes")
        if time.monotonic() > until:
            raise _DamagedAnswerError(f"an answer takes more than {_PATIENCE:g} seconds")
        yield chunk
