"""All programs."""

from tests.backends.deepspeed.programs import (
    adapters,
    calls,
    combined,
    engines,
    experts,
    layouts,
    loaders,
    parameters,
    saving,
    settings,
)

PROGRAMS = (
    *calls.PROGRAMS,
    *parameters.PROGRAMS,
    *settings.PROGRAMS,
    *loaders.PROGRAMS,
    *saving.PROGRAMS,
    *engines.PROGRAMS,
    *layouts.PROGRAMS,
    *experts.PROGRAMS,
    *combined.PROGRAMS,
    *adapters.PROGRAMS,
)
