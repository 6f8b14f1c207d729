"""A configuration as DeepSpeed reads it, with the place of every key and value in its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepspeed_compress.diagnostics import Diagnostic, LineIndex, Path, Place, Span, at, write
from deepspeed_compress.tools.lint.values import AUTO, integer, number, truth

_ZERO = "zero_optimization"
_PARALLELISM = ("deepspeed_compress", "parallelism")
_OFFLOADS = frozenset({"cpu", "nvme"})
_FP32 = ("fp32", "float32", "float", "torch.float32")
Kind = Literal["object", "array", "string", "number", "bool", "null"]


@dataclass(frozen=True, slots=True)
class Node:
    """Value and its place. `value` is plain Python. If a key is repeated, the last value counts."""

    kind: Kind
    value: Any
    span: Span
    members: tuple["Member", ...] = ()
    """Keys of an object, including duplicates."""
    items: tuple["Node", ...] = ()
    """Items of an array."""
    by_key: Mapping[str, "Member"] = field(default_factory=dict, repr=False, compare=False)
    """Keys of an object by name. If a key is repeated, this has the last one."""


@dataclass(frozen=True, slots=True)
class Member:
    """Key of an object, with its value. `key_span` includes the quotes."""

    key: str
    key_span: Span
    value: Node


def object_node(members: Sequence[Member], span: Span) -> Node:
    """Return the object node with the given members."""
    by_key = {member.key: member for member in members}
    value = {key: member.value.value for key, member in by_key.items()}
    return Node("object", value, span, tuple(members), by_key=by_key)


UNQUOTED = "an unquoted string"
"""Kind of extension that is a string without quotes, which extends to the end of its line."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Syntax of HJSON that JSON does not have. DeepSpeed reads HJSON; Hugging Face reads JSON."""

    kind: str
    """Kind of syntax as messages name it, such as "a trailing comma"."""
    span: Span


@dataclass(frozen=True, slots=True)
class Document:
    """Configuration with its text.

    `root` is None if nothing could be read. Reading continues after an error, so `root` can exist together with
    `problems`.
    """

    path: str
    text: str
    root: Node | None
    problems: tuple[Diagnostic, ...] = ()
    """Syntax errors."""
    extensions: tuple[Extension, ...] = ()
    """Syntax that is HJSON but not JSON, in the order of the text."""
    fixable: bool = True
    """True if `text` can be edited; False if it is derived from something else, such as base64."""

    @property
    def data(self) -> dict[str, Any]:
        """Return the configuration as DeepSpeed reads it, or an empty dict if the outermost value is not an object."""
        return self.root.value if self.root is not None and self.root.kind == "object" else {}

    @property
    def readable(self) -> bool:
        """Return True if there is an object to check. An empty object that is left after an error does not count."""
        return self.root is not None and self.root.kind == "object" and bool(self.root.members or not self.problems)

    def get(self, *path: str | int, default: Any = None) -> Any:
        """Return the plain value at `path`, or `default` if part of the path does not exist."""
        value: Any = self.data
        for part in path:
            known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
            if part not in known:
                return default
            value = value[part]
        return value

    def section(self, *path: str | int) -> Mapping[str, Any]:
        """Return the object at `path`, or an empty dict if there is none."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}

    def string(self, *path: str | int) -> str:
        """Return the string at `path`, or an empty one if there is none."""
        value = self.get(*path)
        return value if isinstance(value, str) else ""

    def number(self, *path: str | int, default: Any = None) -> float | None:
        """Return the finite number at `path`, or None if the value is not one."""
        return number(self.get(*path, default=default))

    def integer(self, *path: str | int, default: Any = None) -> int | None:
        """Return the integer at `path` as DeepSpeed's models read it, or None if the value is not one."""
        return integer(self.get(*path, default=default))

    def truth(self, *path: str | int, default: Any = None) -> bool | None:
        """Return the boolean at `path` as DeepSpeed's models read it, or None if the value is not one."""
        return truth(self.get(*path, default=default))

    def is_true(self, *path: str | int) -> bool:
        """Return True if the value at `path` is true, as DeepSpeed's models read it."""
        return self.truth(*path) is True

    def has(self, *path: str | int) -> bool:
        """Return True if there is a value at `path`, including null."""
        return self.node(*path) is not None

    def node(self, *path: str | int) -> Node | None:
        """Return the node of the value at `path`, or None. If a key is repeated, the last one is used."""
        node = self.root
        for part in path:
            if node is None:
                return None
            if isinstance(part, int):
                node = node.items[part] if 0 <= part < len(node.items) else None
            else:
                node = node.by_key[part].value if part in node.by_key else None
        return node

    def member(self, *path: str | int) -> Member | None:
        """Return the key at `path` with its value, or None. If a key is repeated, the last one is used."""
        *above, key = path or (0,)
        holder = self.node(*above)
        return holder.by_key.get(key) if holder is not None and isinstance(key, str) else None

    @property
    def duplicates(self) -> int:
        """Return the number of keys that repeat an earlier key of the same object."""
        return 0 if self.root is None else _duplicates(self.root)

    def locate(self, place: Place, lines: LineIndex | None = None) -> Place:
        """Return `place` with its characters in this text. `lines` is the line index of the text, if there is one."""
        return replace(place, span=self.span_of(place), file=self.path, text=self.text, lines=lines)

    def span_of(self, place: Place) -> Span:
        """Return the characters of `place`: those of its key or value, or of the nearest enclosing one that exists."""
        if place.span is not None:
            return place.span
        for depth in range(len(place.path), 0, -1):
            path = place.path[:depth]
            member, node = self.member(*path), self.node(*path)
            if member is not None and (place.on == "key" or depth < len(place.path)):
                return member.key_span
            if node is not None:
                return node.span
        start = 0 if self.root is None else self.root.span.start
        return Span(start, min(start + 1, len(self.text)))

    @property
    def stage(self) -> int | None:
        """Return the ZeRO stage, or None if it is left to another program ("auto") or cannot be read."""
        ours = self.integer(*_PARALLELISM, "zero_stage")
        if ours is not None:
            return ours
        zero = self.get(_ZERO)
        if not isinstance(zero, dict):
            return int(zero is True)
        value = zero.get("stage", 0)
        return int(value) if isinstance(value, bool) else integer(value)

    def offload(self, what: str) -> str | None:
        """Return the device of `offload_optimizer` or `offload_param`, or None if it is not a valid one."""
        device = self.string(_ZERO, what, "device")
        return device if device in _OFFLOADS else None

    @property
    def scatters(self) -> bool:
        """Return True if gradients are reduce-scattered, which stages 2 and 3 do by default."""
        return self.stage in (2, 3) and self.truth(_ZERO, "reduce_scatter", default=True) is True

    @property
    def bf16(self) -> bool:
        """Return True if the model is in bf16. The old name of the section is used if the new one is missing."""
        return self.is_true("bf16" if self.get("bf16") is not None else "bfloat16", "enabled")

    @property
    def fp16(self) -> bool:
        """Return True if the model is in fp16."""
        return self.is_true("fp16", "enabled")

    @property
    def left_open(self) -> bool:
        """Return True if Hugging Face fills in the precision."""
        return AUTO in (self.get("fp16", "enabled"), self.get("bf16", "enabled"))

    @property
    def chooses_bf16_optimizer(self) -> bool:
        """Return True if DeepSpeed takes BF16_Optimizer, as it does with bf16, stage 1 and accumulation in fp32."""
        wide = self.get("data_types", "grad_accum_dtype") in _FP32
        return wide and self.bf16 and self.stage == 1 and self.offload("offload_optimizer") != "cpu"

    @property
    def optimizer(self) -> str:
        """Return the optimizer's type in lower case, as DeepSpeed compares it, or an empty string."""
        return self.string("optimizer", "type").lower()

    @property
    def parameter_paths(self) -> list[Path]:
        """Return the paths of the parameters of the optimizer and of the scheduler."""
        return [(part, "params", key) for part in ("optimizer", "scheduler") for key in self.section(part, "params")]

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages in the configuration, or 1."""
        ours = self.integer(*_PARALLELISM, "pipeline")
        return max(ours or self.integer("pipeline", "stages") or 1, 1)

    @property
    def tensor_size(self) -> int:
        """Return the number of tensor-parallel ranks in the configuration, or 1."""
        ours = self.integer(*_PARALLELISM, "tensor")
        return max(ours or self.integer("tensor_parallel", "autotp_size") or 1, 1)


def unread(path: str, text: str, span: Span, what: str, instead: str) -> Document:
    """Return the document of a file that cannot be read: a problem at `span` of its text, and no values."""
    return Document(path, text, None, (Diagnostic(at(span=span), what, write(instead)),), fixable=False)


def _duplicates(node: Node) -> int:
    inside = (*(member.value for member in node.members), *node.items)
    return len(node.members) - len(node.by_key) + sum(map(_duplicates, inside))
