"""Everything that the package raises or warns about.

CompressError
├── ConfigError         the configuration is unreadable, unknown, contradictory or out of range
├── SeamError           this DeepSpeed does not have the method that we attach to
├── UnsupportedError    the configuration is valid, but cannot be right for this engine
├── IslandError         an island has lost the others for too long
├── StateError          saved compression state is missing, damaged or of another run
└── DataError           a corpus or tokenizer cannot be found or read

CompressWarning (a UserWarning)   a setting has no effect, or costs more than it gives
"""

__all__ = [
    "CompressError",
    "CompressWarning",
    "ConfigError",
    "DataError",
    "IslandError",
    "SeamError",
    "StateError",
    "UnsupportedError",
]


class CompressError(Exception):
    """Base of every error of this package."""


class ConfigError(CompressError, ValueError):
    """The configuration is unreadable, unknown, contradictory or out of range."""


class SeamError(CompressError, RuntimeError):
    """The installed DeepSpeed lacks a method that the package attaches to."""


class UnsupportedError(CompressError, ValueError):
    """A valid configuration that cannot be right for this engine."""


class IslandError(CompressError, RuntimeError):
    """An island has lost the others, or the coordinator, for longer than it may wait."""


class StateError(CompressError, RuntimeError):
    """Saved compression state is missing, damaged or belongs to another run."""


class DataError(CompressError, ValueError):
    """A corpus, token cache or tokenizer cannot be found or read."""


class CompressWarning(UserWarning):
    """A setting has no effect, or costs more than it gives."""
