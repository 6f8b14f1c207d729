"""Publication of a model's weights by the ranks that train it."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from types import MappingProxyType
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from deepspeed_compress.compression.compressors.base import DTYPES
from deepspeed_compress.errors import ConfigError, RolloutError, UnsupportedError
from deepspeed_compress.rollout.adapters import Adapter, AdapterConfig, AdapterForm, find_adapter
from deepspeed_compress.rollout.parts import SliceDigest
from deepspeed_compress.rollout.ranks import PublishingRanks, finished
from deepspeed_compress.rollout.shares import Share, digest_slice, make_manifest, write_share
from deepspeed_compress.rollout.slices import Region, Slice, find_holders, find_shares
from deepspeed_compress.rollout.sources import find_held, unwrap
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Chain, Dtype, extend_chain, model_digest, take_over


@dataclass(frozen=True)
class Published:
    """Report of a published version.

    Attributes:
        version: its number.
        digest: digest of the whole model, as a receiver of this version holds it.
        change_bytes: bytes of the changes since the version before and of the manifest, over all ranks.
        full_bytes: bytes of the full copy; 0 if the version has none.
        changed: share of the values that changed; 1.0 if the version before is not known.
        seconds: time from the call of `publish` until the version was complete.
        encode_seconds: time of encoding on the slowest rank.
        write_seconds: time of writing to the store on the slowest rank.
        age: seconds from the call that published the version before until this one was complete; None if that is not
            known. Weights of a receiver that is never late are at most so old.
        step: the optimizer step that `publish` was called with.
        lag: the number of versions that `report_lag` was called with, before the call of `publish`.
    """

    version: int
    digest: str
    change_bytes: int
    full_bytes: int
    changed: float
    seconds: float
    encode_seconds: float = 0.0
    write_seconds: float = 0.0
    age: float | None = None
    step: int | None = None
    lag: float | None = None


@dataclass(frozen=True)
class _Call:
    """Call of `publish`: its time, and what the report of its version repeats."""

    began: float
    step: int | None
    lag: float | None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


class Publisher:
    """Publisher of a model's weights. Every rank of the job has one, and calls its methods together with the others.

    Each rank encodes and stores only its share of the model, and holds a copy of the share in host memory, in the
    published type, and two copies if asynchronous or merging adapters. After a restart, the first call publishes a full
    copy, unless the newest version in the store has the same digest as the model.

    Args:
        model: a module, a DDP or FSDP2 model, or a DeepSpeed engine with ZeRO 0 to 3, AutoTP or a pipeline.
        store: storage that all ranks and all receivers share.
        dtype: type of the published weights, to which those of training are cast: "bf16", "fp16" or "fp32". Weights of
            this type keep all bits. A NaN of another type stays a NaN, in which torch's conversion may set other bits.
        every: number of calls of `publish` per version.
        full_every: number of versions per full copy.
        keep_full: number of full copies to keep. Everything before the oldest of them is deleted.
        asynchronous: encode and store in a thread, so that `publish` only copies the weights to host memory. Call
            `wait` at the end of training.
        bits: bits per value of lossy changes, 4 or 8; None for exact ones. With lossy changes, this rank holds its
            share as receivers do. Each version sends the difference between the weights and that, so it corrects the
            errors of earlier ones.
        listener: receives the report of each version, on all ranks, in the thread that calls `publish` or `wait`.
        names: names of the model's submodules in the plain model that receivers hold, if they differ. A
            PipelineModule needs the names of its layers, such as {"1": "model.layers.0"}, unless the section's
            `parallelism` has made it.
        adapters: what is published of a model with a LoRA adapter of PEFT: the adapter "alone", which engines load next
            to their own base, or the weights with the adapter "merged" into them. None publishes all parameters under
            the names of PEFT, for a receiver with the same PEFT model.

    Raises:
        ConfigError: `dtype`, `bits` or `adapters` is not known, a number is below 1, or both `names` and `adapters` are
            given.
        UnsupportedError: ranks hold parts of the model in a way that is not known, a parameter has no known name in the
            plain model, or the adapter cannot be published in this form.

    Attributes:
        calls: number of calls of `publish` so far.
        adapters: see the argument.

    Examples:
        >>> publisher = Publisher(engine, DirectoryStore("/shared/policy"))
        >>> publisher.publish()  # the initial weights
        >>> engine.step()
        >>> publisher.publish()
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        dtype: Dtype = "bf16",
        every: int = 1,
        full_every: int = 100,
        keep_full: int = 2,
        asynchronous: bool = False,
        bits: Literal[4, 8] | None = None,
        listener: Callable[[Published], None] = lambda published: None,
        names: Mapping[str, str] = MappingProxyType({}),
        adapters: AdapterForm | None = None,
    ) -> None:
        _check_options(dtype, bits, adapters, names, every=every, full_every=full_every, keep_full=keep_full)
        self._store, self._dtype, self._names, self.adapters = store, dtype, names, adapters
        self._every, self._full_every, self._keep_full, self._bits = every, full_every, keep_full, bits
        self._ranks, self._listener = PublishingRanks(), listener
        self._module, self._holders = self._find_holders(model)
        self._own = {region for region, ranks in self._holders.items() if self._ranks.rank in ranks}
        self._thread = ThreadPoolExecutor(1, "rollout") if asynchronous else None
        self._running: Future[Published] | None = None
        self.calls = 0
        self._chain: Chain | None = None
        """End of the chain in the store, to which `_held` belongs; None before the first version, or after an error."""
        self._held_since: float | None = None
        """Time of the call that published what is held."""
        self._lag: float | None = None
        self._held: list[Slice] = []
        self._snapshot: list[Tensor] = []
        """Buffers for the weights of this step, which a thread publishes while training changes them."""
        self._config: AdapterConfig | None = None
        """Settings of the adapter, if it is published alone."""

    def _find_holders(self, model: nn.Module) -> tuple[nn.Module, Mapping[Region, tuple[int, ...]]]:
        """Return the user's module, and the ranks that hold each region of it. Collective."""
        module, held, problem = model, [], None
        try:
            module = unwrap(model)
            held = [one.region for one in self._find_held(module)[0]]
        except UnsupportedError as error:
            problem = str(error)
        everyone = self._ranks.gather(lambda: (held, problem))
        problems = [one for _, one in everyone if one is not None]
        if problems:
            raise UnsupportedError(problems[0])
        return module, find_holders([regions for regions, _ in everyone])

    def _find_held(self, module: nn.Module) -> tuple[list[Slice], Adapter | None]:
        """Return the slices that this rank holds of what is published, and the adapter that is."""
        if self.adapters is None:
            return find_held(module, self._names), None
        adapter = find_adapter(module, self.adapters)
        return find_held(module, adapter.names, adapter.names), adapter

    @property
    def version(self) -> int | None:
        """Return the newest complete version; None before the first one, during a call, and after an error."""
        return None if self._chain is None else self._chain.version

    def report_lag(self, versions: float) -> None:
        """Report by how many versions the samples of this step are behind. The next version's report repeats it."""
        self._lag = versions

    def publish(self, full: bool = False, step: int | None = None) -> Published | None:
        """Publish the current weights. Call it between optimizer steps, on all ranks.

        Args:
            full: publish now, with a full copy, even if neither is due.
            step: number of the optimizer step, for the report.

        Returns:
            The report; None if no version is due. If asynchronous, the report of the version before, if there is one.

        Raises:
            RolloutError: a rank could not publish; if asynchronous, the version before. The next version has a full
                copy. All ranks raise it.
        """
        self.calls += 1
        if (self.calls - 1) % self._every and not full:
            return None
        call, before = _Call(time.perf_counter(), step, self._lag), self.wait()
        self._lag, copied = None, finished(self._copies)
        if self._thread is None:
            return self._reported(self._publish(copied, full, call))
        self._running = self._thread.submit(self._publish, copied, full, call)
        return before

    def wait(self) -> Published | None:
        """Wait for the version that a thread publishes. Return its report, or None if there is no such version.

        Raises:
            RolloutError: see `publish`.
        """
        running, self._running = self._running, None
        return None if running is None else self._reported(running.result())

    def _reported(self, published: Published) -> Published:
        self._listener(published)
        return published

    def _copies(self) -> Iterable[Slice]:
        """Return copies of this rank's slices in host memory, in the published type.

        If asynchronous, all copies are complete when this returns. Otherwise, they are made one after the other, in the
        same memory. On CUDA, they are made in the current stream, which must be the one that the optimizer steps in.

        Raises:
            UnsupportedError: the model has other parameters than it had in the constructor.
            RolloutError: a finite value is too large for fp16. This is raised when the copy is taken.
        """
        held, adapter = self._find_held(self._module)
        changed = sorted({name for name, *_ in self._own ^ {one.region for one in held}})
        if changed:
            problem = f"parameters were added, removed or resized since it was made: {', '.join(changed[:3])}"
            raise UnsupportedError(f"{problem}; make a new Publisher, and receivers with the new model")
        slices, dtype = find_shares(held, self._holders, self._ranks.rank), DTYPES[self._dtype]
        self._config = None if adapter is None else adapter.config
        if self._thread is None and self.adapters != "merged":
            largest = max(slices, key=lambda one: one.values.numel(), default=None)
            return _checked(slices, _copied(slices, repeat(_host_buffer(largest.values, dtype)) if largest else ()))
        self._snapshot = self._snapshot or [_host_buffer(one.values, dtype) for one in slices]
        copies = list(_copied(slices, self._snapshot))
        if adapter is not None:
            _merge(adapter, slices, copies)
        # Not before, because all ranks take part in merging.
        return list(_checked(slices, copies))

    def _publish(self, copied: Future[Iterable[Slice]], full: bool, call: _Call) -> Published:
        """Publish the copied weights and hold them. All collective calls are made here, in this order.

        An error of copying is raised inside of such a call, so that no rank waits for another.
        """
        chain, self._chain = self._chain, None
        held = None if chain is None else self._held
        if chain is None:
            chain = self._ranks.from_first(lambda: take_over(self._store, self._dtype))
            digests = self._ranks.gather(lambda: self._hold(copied.result()))
            if not full and model_digest(one for some in digests for one in some) == chain.digest:
                same = Published(chain.version, chain.digest, 0, 0, 0.0, call.seconds, step=call.step, lag=call.lag)
                return self._published(chain, same, call)
        full = full or held is None or chain.version + 1 - chain.full >= self._full_every
        rank, version = self._ranks.rank, chain.version + 1
        shares = self._ranks.gather(
            lambda: write_share(
                self._store, chain, rank, self._held if held is None else copied.result(), held, full, self._bits
            )
        )
        published = self._ranks.from_first(lambda: self._complete(chain, shares, call))
        newest = replace(chain, version=version, digest=published.digest, full=version if full else chain.full)
        return self._published(newest, published, call)

    def _hold(self, copies: Iterable[Slice]) -> list[SliceDigest]:
        """Hold the weights of `copies`, and return their digests."""
        self._held = []
        self._held = [replace(one, values=one.values.clone()) for one in copies]
        return [digest_slice(one) for one in self._held]

    def _published(self, chain: Chain, published: Published, call: _Call) -> Published:
        self._chain, self._held_since = chain, call.began
        return published

    def _complete(self, chain: Chain, shares: Sequence[Share], call: _Call) -> Published:
        """Complete a version of which all ranks have written their shares, and delete old ones.

        Raises:
            RolloutError: another publisher has taken over the store.
        """
        manifest = make_manifest(chain, self._dtype, shares, self._config)
        size = extend_chain(self._store, chain, manifest, self._keep_full)
        parts = manifest.changes.parts if manifest.changes else ()
        total = sum(one.numel for share in shares for one in share.digests)
        changed = sum(part.changed for part in parts) / max(1, total) if manifest.changes else 1.0
        return Published(
            manifest.version,
            manifest.digest,
            size + sum(part.size for part in parts),
            sum(part.size for part in manifest.full or ()),
            changed,
            call.seconds,
            max(share.encode_seconds for share in shares),
            max(share.write_seconds for share in shares),
            None if self._held_since is None else time.perf_counter() - self._held_since,
            call.step,
            call.lag,
        )


def _check_options(dtype: object, bits: object, adapters: object, names: Mapping[str, str], **counts: int) -> None:
    """Check the arguments of a publisher.

    Raises:
        ConfigError: one is not possible.
    """
    choices = {"dtype": (dtype, get_args(Dtype)), "bits": (bits, (4, 8, None))}
    choices["adapters"] = adapters, (*get_args(AdapterForm), None)
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{name} {value!r} is not known (allowed: {', '.join(map(str, allowed))})")
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} {count} is not possible (allowed: 1 or more)")
    if adapters is not None and names:
        raise ConfigError("names has no effect with adapters, which have names of their own: leave one of them out")


def _copied(slices: Iterable[Slice], buffers: Iterable[Tensor]) -> Iterator[Slice]:
    """Copy each slice to the beginning of a buffer, and yield the flat copy."""
    for one, buffer in zip(slices, buffers, strict=False):
        values = buffer[: one.values.numel()]
        values.view(one.values.shape).copy_(one.values)
        yield replace(one, values=values)


def _checked(slices: Iterable[Slice], copies: Iterable[Slice]) -> Iterator[Slice]:
    """Yield the copies.

    Raises:
        RolloutError: a finite value is too large for fp16.
    """
    for one, copy in zip(slices, copies, strict=True):
        if copy.values.dtype is torch.float16:
            # Values of training may be infinite or NaN themselves.
            infinite = copy.values.view(one.values.shape).isinf()
            if infinite.any() and one.values[infinite.to(one.values.device)].isfinite().any():
                problem = "has values above 65,504, the largest number of fp16"
                raise RolloutError(f'parameter "{one.name}" {problem}; publish "bf16" or "fp32"')
        yield copy


def _merge(adapter: Adapter, slices: Sequence[Slice], copies: Sequence[Slice]) -> None:
    """Add the changes of an adapter to copies of the slices that it changes. Collective under ZeRO 3."""
    pairs = defaultdict[str, list[tuple[Slice, Tensor]]](list)
    for one, copy in zip(slices, copies, strict=True):
        pairs[one.name].append((one, copy.values))
    for name, change in adapter.changes():
        for one, values in pairs[name]:
            merged = (one.values + one.select(change)).to(one.values.dtype)
            values.view(one.values.shape).copy_(merged)


def _host_buffer(values: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(values.numel(), dtype=dtype, pin_memory=values.is_cuda)
