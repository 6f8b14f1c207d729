"""Imported by the fork server besides what all tests need: each rank would import it anew otherwise, seconds each."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401

    import deepspeed_compress.integrations.hf  # noqa: F401
