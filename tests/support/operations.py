"""What DeepSpeed compiles on its first use on a machine, a minute or more each; later, seconds in each process.

`python -m tests.support.operations` compiles what is missing.
"""

BUILDERS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder")


def load_operations() -> None:
    """Into this process and its forks, those for which the machine has what it takes."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    for name in BUILDERS:
        builder = get_accelerator().create_op_builder(name)
        if __compatible_ops__[builder.NAME]:
            builder.load(verbose=False)


if __name__ == "__main__":
    load_operations()
