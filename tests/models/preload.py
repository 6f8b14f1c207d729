"""Imported by the fork server besides what all tests need: each rank would import it anew otherwise, a second each."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
