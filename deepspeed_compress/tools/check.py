"""`ds-compress check`: print every error of the section, or the section with its defaults."""

import argparse
import json

from deepspeed_compress.config import check_world, parse_section, read_ds_config
from deepspeed_compress.config.section import find_problems


def run(options: argparse.Namespace) -> int:
    """Print the errors, or the section with its defaults as JSON. Return exit code 1 if there are errors, else 0."""
    ds_config = read_ds_config(options.config)
    problems = find_problems(ds_config, options.world_size)
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(f"{options.config}: {len(problems)} error{'s' if len(problems) > 1 else ''}")
        return 1
    section = parse_section(ds_config)
    print(json.dumps(section.model_dump(mode="json"), indent=2))
    if options.world_size is not None:
        ranks = check_world(section, options.world_size, ds_config)
        print(f"data-parallel size: {ranks} of {options.world_size} ranks")
    return 0
