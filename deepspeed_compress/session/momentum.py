"""Check for momentum that both the method and the optimizer would apply to the gradients."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deepspeed_compress.config import CompressConfig
from deepspeed_compress.config.contradictions import WITH_TRAINER
from deepspeed_compress.config.schedules import OWN_MOMENTUM


def find_second_momentum(param_groups: Iterable[Mapping[str, Any]], config: CompressConfig) -> Iterator[str]:
    """Yield a problem, with the fix, if an optimizer with these groups would apply momentum a second time."""
    if config.gradients.method not in OWN_MOMENTUM:
        return
    found = {_first_momentum(group) for group in param_groups} - {0.0}
    if found:
        yield (
            f"/deepspeed_compress/gradients/method {config.gradients.method} applies momentum to the "
            f"gradients, and the optimizer would apply momentum {max(found)} on top; allowed: none. Write "
            f"optimizer.params.betas: [0.0, 0.95] for Adam{WITH_TRAINER}; optimizer.params.momentum: 0.0 for SGD"
        )


def _first_momentum(group: Mapping[str, Any]) -> float:
    """Return the factor of the optimizer's first moment; 0.0 if it has none."""
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
