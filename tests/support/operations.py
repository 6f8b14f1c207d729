"""DeepSpeed's compiled operations. Compiling takes more than a minute each, and loading takes seconds per process.

`python -m tests.support.operations` compiles the missing ones.
"""

BUILDERS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder")


def load_operations() -> None:
    """Load all operations that this machine supports into this process, for its forks."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    for name in BUILDERS:
        builder = get_accelerator().create_op_builder(name)
        if __compatible_ops__[builder.NAME]:
            builder.load(verbose=False)


if __name__ == "__main__":
    load_operations()
