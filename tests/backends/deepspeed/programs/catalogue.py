"""All programs."""

from tests.backends.deepspeed.programs import calls, engines, experts, layouts, parameters, saving, settings

PROGRAMS = (
    *calls.PROGRAMS,
    *parameters.PROGRAMS,
    *settings.PROGRAMS,
    *saving.PROGRAMS,
    *engines.PROGRAMS,
    *layouts.PROGRAMS,
    *experts.PROGRAMS,
)
