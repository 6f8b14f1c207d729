"""`ds-compress check`: print every error of the section, or the section with its defaults."""

import argparse
import json
import warnings
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config import SECTION, check_world, expand, parse_section, read_ds_config, with_preset
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.tables import print_table


def run(options: argparse.Namespace) -> int:
    """Print the errors, or the section with its defaults. Return exit code 1 if there are errors, else 0."""
    ds_config = read_ds_config(options.config)
    problems = find_problems(ds_config, options.world_size)
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(f"{options.config}: {len(problems)} error{'s' if len(problems) > 1 else ''}")
        return 1
    _print_resolved(ds_config, options.world_size)
    return 0


def _print_resolved(ds_config: dict[str, Any], world_size: int | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        section = parse_section(ds_config)
        ranks = check_world(section, world_size, ds_config) if world_size is not None else None
    written = ds_config[SECTION]
    origins = dict.fromkeys(_keys(with_preset(ds_config)), "preset") | dict.fromkeys(_keys(written), "")
    # Training sees the values of the preset in place of the key.
    leaves = _leaves(section.model_dump(mode="json") | {"preset": written.get("preset")})
    rows = ((key, json.dumps(value), origins.get(key, "default")) for key, value in leaves)
    print_table(f"{SECTION}, with defaults", ("key", "value", ""), rows, ("key", "value", ""))
    expanded = expand(ds_config, section)
    for key in sorted(key for key in expanded if expanded[key] != ds_config.get(key)):
        print(f"DeepSpeed gets {key}: {json.dumps(expanded[key])}")
    if ranks is not None:
        print(f"data-parallel size: {ranks} of {world_size} ranks")
    for warning in caught:
        print(f"warning: {warning.message}")


def _keys(section: Mapping[str, Any]) -> list[str]:
    """Return the JSON pointers of the values in `section`."""
    return [key for key, _ in _leaves(section)]


def _leaves(value: object, key: str = "") -> list[tuple[str, object]]:
    """Return the JSON pointers and values of everything except non-empty objects."""
    if not isinstance(value, Mapping) or not value:
        return [(key, value)]
    return [leaf for name, child in value.items() for leaf in _leaves(child, f"{key}/{name}")]
