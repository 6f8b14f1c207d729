"""Imported once by the fork server, besides `tests.support.preload`: what takes seconds in every new process."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers.integrations.deepspeed  # noqa: F401
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder
    from transformers import LlamaForCausalLM, TrainingArguments  # noqa: F401

    # Built on the first use on a machine, for more than a minute each.
    FusedAdamBuilder().load()
    CPUAdamBuilder().load()
