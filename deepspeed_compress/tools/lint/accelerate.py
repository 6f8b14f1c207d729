"""YAML configurations of Accelerate, which name a DeepSpeed configuration or hold its most used settings."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.embedded import embedded, named_file
from deepspeed_compress.tools.lint.files import Source


def accelerate_sources(document: Document, read: Callable[[str], Iterable[Source]]) -> Iterator[Source]:
    """The DeepSpeed configuration in one of Accelerate, and the one that it names; none where it is not used."""
    if document.get("distributed_type", default="DEEPSPEED") != "DEEPSPEED":
        return
    ranks = document.get("num_processes")
    hints: dict[str, Any] = {"framework": "accelerate"}
    if isinstance(ranks, int) and ranks > 0:
        hints["world_size"] = ranks
    yield Source(embedded(document), hints)
    file = named_file(document)
    for source in () if file is None else read(file):
        yield Source(source.document, hints)
