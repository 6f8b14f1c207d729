"""Imported once by the fork server, so that a forked rank starts in a fraction of a second."""

import logging
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer

    import deepspeed_compress.engine
    import deepspeed_compress.models
    import deepspeed_compress.training.main  # noqa: F401

deepspeed.utils.logger.setLevel(logging.ERROR)
