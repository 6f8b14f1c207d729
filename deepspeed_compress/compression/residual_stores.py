"""The residuals and momenta of a run: one store for each content, with names that tell owners apart."""

from dataclasses import dataclass, field, replace

from deepspeed_compress.compression.residuals import Residuals


def full_name(kind: str, owner: str) -> str:
    """Return the name of the store that holds `kind` ("gradients", "means" ...) for the parameters of `owner`."""
    return f"{owner}/{kind}" if owner else kind


def kind_of(name: str) -> str:
    """Return what the store `name` holds: "means" for "ep_size_2_rank_1/means"."""
    return name.rpartition("/")[2]


def owner_of(name: str) -> str:
    """Return the owner of the store `name`: "ep_size_2_rank_1" for "ep_size_2_rank_1/means", "" for "means"."""
    return name.rpartition("/")[0]


@dataclass
class ResidualStores:
    """The residuals and momenta of a run, by content ("gradients", "means", "velocity" ...), created on first use.

    Attributes:
        transactional: the optimizer may skip a step.
        by_name: the stores.
        owner: name of the parameters whose values are kept here, if only some ranks have these parameters; "" for those
            of all ranks. Parameters of different owners may have equal names, so their stores have different names.
    """

    transactional: bool
    by_name: dict[str, Residuals] = field(default_factory=dict)
    owner: str = ""

    def of(self, owner: str) -> "ResidualStores":
        """Return the stores of `owner`, which are kept, committed and saved together with these."""
        return replace(self, owner=owner)

    def get(
        self, name: str, dtype: str, on_host: bool = False, scaled: bool = True, transactional: bool | None = None
    ) -> Residuals:
        """Return the store `name`, created with the given options if it does not exist.

        `transactional`: None for the run's default; False if values are written only once the step is certain.
        """
        known = full_name(name, self.owner)
        if known not in self.by_name:
            chosen = self.transactional if transactional is None else transactional
            self.by_name[known] = Residuals(dtype, chosen, on_host, scaled)
        return self.by_name[known]
