"""Errors and warnings of the package.

CompressError
├── ConfigError         the configuration is unreadable, unknown, contradictory or out of range
├── SeamError           this DeepSpeed lacks a method that the package attaches to
├── UnsupportedError    the configuration is valid, but cannot be right for this engine
├── IslandError         an island has lost the others for too long
├── StateError          saved compression state is missing, damaged or from another run
├── RolloutError        weights for rollout workers cannot be published, read or verified
└── DataError           a corpus or tokenizer cannot be found or read

CompressWarning (a UserWarning)   a setting has no effect, or costs more than it gains
"""

from pathlib import Path


class CompressError(Exception):
    """Base class of every error of this package."""


class ConfigError(CompressError, ValueError):
    """Unreadable, unknown, contradictory or out-of-range configuration."""


class SeamError(CompressError, RuntimeError):
    """Library version that the package cannot attach to, or a patch that other code has replaced."""


class UnsupportedError(CompressError, ValueError):
    """Valid configuration that cannot be right for this engine."""


class IslandError(CompressError, RuntimeError):
    """Island that has lost the others, or the coordinator, for longer than it may wait."""


class StateError(CompressError, RuntimeError):
    """Saved compression state that is missing, damaged or belongs to another run."""


class RolloutError(CompressError, RuntimeError):
    """Weights for rollout workers that cannot be published, read or verified."""


class DataError(CompressError, ValueError):
    """Corpus, token cache or tokenizer that cannot be found or read."""


class CompressWarning(UserWarning):
    """Setting that has no effect, or costs more than it gains."""


def install_command(extra: str) -> str:
    """Return the command that installs `extra` of this package, for messages that name a missing package.

    It installs from the checkout that this module is in, if it is in one. No package index has this package yet.
    """
    checkout = Path(__file__).parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f'pip install -e "{checkout}[{extra}]"'
    return f'pip install ".[{extra}]" in a checkout of deepspeed_compress'
