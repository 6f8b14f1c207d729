"""Numbers of ranks on which a checkpoint loads, judging by the names of its files and the state of compression."""

import json
from pathlib import Path

from deepspeed_compress.safe_files import read_text


def loads_on(place: Path) -> str:
    """Return a short text for the tag directory `place`. Replicas are the ranks of one data-parallel group."""
    if (place / "zero").is_dir():
        return "any sizes, with load_universal"
    models = len({file.name.partition("mp_rank_")[2] for file in place.glob("*mp_rank_*_model_states.pt")})
    parts = f" x {models} (tensor, pipeline)" if models > 1 else ""
    if any(place.glob("*expert_*_states.pt")) or (place / "offloaded_tensors").is_dir() or _by_node(place):
        return f"the same number of replicas{parts}"
    return f"any number of replicas{parts}"


def _by_node(place: Path) -> bool:
    """Return True if the residuals are those of a hierarchy."""
    try:
        found = json.loads(read_text(place / "deepspeed_compress_rank_00000.json"))
        return bool(found["position"]["node_size"] > 1)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
