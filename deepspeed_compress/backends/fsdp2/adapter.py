"""Backend for PyTorch's FSDP2 (`fully_shard`): replaces its reduce-scatter of gradients and its all-gather of weights.

The seams are `FSDPModule.set_custom_reduce_scatter` and `set_custom_all_gather` (torch/distributed/fsdp/_fully_shard).
Residuals are stored by parameter name and element range, so they do not depend on how a model is sharded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed_compress.backends.announce import announce, gradient_texts, weight_text
from deepspeed_compress.backends.fsdp2.gradients import compress_gradients, count_gradients, uncompressed_bytes
from deepspeed_compress.backends.fsdp2.limits import find_division_limits, find_gradient_limits, find_weight_limits
from deepspeed_compress.backends.fsdp2.units import Ranks, Unit, check_torch_of_fsdp2, find_units, gather_dtype
from deepspeed_compress.backends.fsdp2.weights import Gathers, is_gathered_by_us
from deepspeed_compress.backends.groups import find_place_in, make_group, make_groups, make_hybrid_groups, number_alike
from deepspeed_compress.backends.limits import find_common_limits, find_foreign_optimizer, refuse
from deepspeed_compress.backends.sessions import Attached, Config, attach_session, describe, read_section
from deepspeed_compress.backends.steps import forget_if_cleared, forget_when_cleared, unwrap
from deepspeed_compress.collectives.buckets import partition_each
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reduction import Groups
from deepspeed_compress.collectives.weight_reduction import WeightReduction, find_rounded, warn_without_frozen
from deepspeed_compress.compression.state_description import Position
from deepspeed_compress.config import CompressConfig, CompressedWeights, WeightsConfig
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.model_families import user_name
from deepspeed_compress.session.session import Session


def attach(model: nn.Module, config: Config, optimizer: Optimizer, scaler: GradScaler | None = None) -> Attached:
    """Compress the communication of `model`. Call it once, on all ranks of its mesh, before the first forward.

    Args:
        model: a model after `fully_shard`. All sharded modules must use the same mesh, with one dimension, or with two
            for copies of the model (HSDP), of which the first is that of the copies.
        config: a path or a dict, with the section `deepspeed_compress`.
        optimizer: the optimizer of the parameters of `model`, or a wrapper of it such as Accelerate's. Its steps also
            end the steps of compression.
        scaler: the `GradScaler` of the loss, if there is one.

    Returns:
        A handle that saves and loads the state of compression and reports on it.

    Raises:
        ConfigError: the section is missing or wrong.
        UnsupportedError: this model cannot be compressed correctly, or not with this section.
        SeamError: this version of PyTorch is not supported.

    Examples:
        >>> for block in network.blocks:
        ...     fully_shard(block)
        >>> fully_shard(network)
        >>> optimizer = torch.optim.AdamW(network.parameters())
        >>> compression = deepspeed_compress.fsdp2.attach(network, "ds_config.json", optimizer)
        >>> compression.save("checkpoint/step_100")
    """
    check_torch_of_fsdp2()
    section, document = read_section(config)
    optimizer = unwrap(optimizer)
    divided = _Divided.of(model)
    refuse(model, _limits(divided, section, optimizer))
    described = describe(section, document, divided.whole, divided.trained, divided.device, divided.make_groups)
    attached = attach_session(described, divided.position(section), optimizer, scaler)
    with attached.session.patches.undone_on_failure():
        _exchange(model, divided, attached)
    return attached


def _exchange(model: nn.Module, divided: "_Divided", attached: Attached) -> None:
    """Install the hooks on `model` that the section requires. If this raises, nothing is left on the model."""
    session = attached.session
    exchange = compress_gradients if session.config.gradients.method != "none" else count_gradients
    checks = exchange(divided.units, divided.ranks, attached)
    weights, rounded = None, divided.rounded(session.config.weights)
    if isinstance(session.config.weights, CompressedWeights):
        weights = WeightReduction(session.config.weights, divided.gathered, session.run)
        warn_without_frozen(weights, rounded)
    gathers = Gathers(model, divided.units, divided.ranks, session, weights, rounded)
    hook = partial(_check, [*checks, gathers.check])
    session.patches.on_undo(model.register_forward_pre_hook(hook, prepend=True).remove)
    for unit in divided.units:
        # Methods of `register_fsdp_forward_method` and parts of the model do not call its hooks.
        session.patches.precede(unit.theirs, "pre_forward", partial(_forget_cleared, attached, divided.units))
    forget_when_cleared(model, attached.steps, session.patches)
    copies = divided.ranks.size // divided.ranks.shard.size()
    where = "FSDP2" if copies == 1 else f"FSDP2, {copies} copies of the model"
    announce(session, divided.whole, where, partial(_figures, divided, session))


@dataclass(frozen=True)
class _Divided:
    """A model that FSDP2 has sharded. `whole`: process group of all ranks that train it, including copies."""

    units: Sequence[Unit]
    ranks: Ranks
    whole: ProcessGroup

    @classmethod
    def of(cls, model: nn.Module) -> "_Divided":
        units = find_units(model)
        if not any(unit.trained() for unit in units):
            raise UnsupportedError("no trained parameter of this model is sharded; call fully_shard first")
        ranks = units[0].ranks()
        if ranks.replicate is None:
            return cls(units, ranks, ranks.shard)
        number_alike(ranks.shard, ranks.replicate)
        return cls(units, ranks, make_group(units[0].theirs.mesh_info.mesh.mesh.flatten().tolist()))

    @property
    def device(self) -> torch.device:
        """Return the device of the gradients, including those of parameters that are offloaded to the host."""
        device: torch.device = self.units[0].theirs.device
        return device

    @cached_property
    def trained(self) -> Parameters:
        """Return the description of the trained parameters for reducers.

        Uncompressed elements are sent in a dtype that holds all gradients exactly.
        """
        dtypes = {dtype for unit in self.units for dtype in unit.reduce_dtypes(unit.trained())}
        every = {name: parameter for unit in self.units for name, parameter in unit.trained().items()}
        return _described(every, self.units, reduce(torch.promote_types, dtypes))

    @cached_property
    def gathered(self) -> Parameters:
        """Return the description of all parameters, including frozen ones."""
        every = {name: one.sharded_param for unit in self.units for name, one in unit.parameters()}
        return _described(every, self.units, self.trained.dtype)

    def position(self, config: CompressConfig) -> Position:
        """Return the position of this rank, to which all of its residuals belong."""
        if self.ranks.replicate is None:
            return find_place_in(self.whole, config)
        return Position(self.whole.rank(), self.whole.size(), 0, 1, node_size=self.ranks.shard.size())

    def make_groups(self, whole: ProcessGroup, config: CompressConfig) -> Groups:
        """Return the groups for messages. All ranks must call this."""
        shard, replicate = self.ranks.shard, self.ranks.replicate
        return make_groups(whole, config) if replicate is None else make_hybrid_groups(shard, replicate, whole)

    def rounded(self, weights: WeightsConfig) -> frozenset[str]:
        """Return the names of the parameters that are rounded when they are gathered."""
        if not isinstance(weights, CompressedWeights):
            return frozenset()
        trained = {name for unit in self.units for name in unit.trained()}
        local = {name: one._sharded_local_tensor for unit in self.units for name, one in unit.parameters()}
        frozen = {name: one for name, one in local.items() if name not in trained}
        return find_rounded(weights, {name: local[name] for name in trained}, frozen)


def _described(parameters: Mapping[str, Parameter], units: Sequence[Unit], dtype: torch.dtype) -> Parameters:
    shapes = {name: shape for unit in units for name, shape in unit.shapes.items()}
    names = {name: user_name(parameter, name) for name, parameter in parameters.items()}
    return Parameters(
        {name: shapes[name] for name in parameters},
        sorted(names.values()),
        dtype=dtype,
        user_names=names,
        frozen=frozenset(name for name, one in parameters.items() if not one.requires_grad),
    )


def _limits(divided: _Divided, section: CompressConfig, optimizer: Optimizer) -> Iterator[str]:
    units, ranks, weights = divided.units, divided.ranks, section.weights
    yield from find_common_limits(section, optimizer, divided.device)
    if any(is_gathered_by_us(unit) for unit in units):
        yield "it is already attached; call attach once"
    yield from find_foreign_optimizer(optimizer, [one for unit in units for one in unit.trained().values()])
    if section.gradients.method != "none" or isinstance(weights, CompressedWeights):
        yield from find_division_limits(units, ranks)
    if section.gradients.method != "none":
        yield from find_gradient_limits(units, ranks, section)
    if isinstance(weights, CompressedWeights):
        yield from find_weight_limits(units, weights, divided.rounded(weights))


def _check(checks: Sequence[Callable[[], None]], model: nn.Module, inputs: object) -> None:
    for check in checks:
        check()


def _forget_cleared(attached: Attached, units: Sequence[Unit]) -> None:
    forget_if_cleared(attached.steps, (one.sharded_param for unit in units for _, one in unit.parameters()))


def _figures(divided: _Divided, session: Session) -> list[str]:
    """Return texts about one reduction per step."""
    texts, shards, config = [], divided.ranks.shard.size(), session.config
    if config.gradients.method != "none":
        trained = divided.trained
        sizes = [(name, trained.numel(name)) for name in trained.shapes]
        alone = [
            uncompressed_bytes(unit, names, divided.ranks) for unit in divided.units if (names := [*unit.trained()])
        ]
        texts += gradient_texts(session, trained, [partition_each(sizes, shards)], False, sum(alone))
    if isinstance(config.weights, CompressedWeights):
        when, rounded, gathered = "each time they are gathered", divided.rounded(config.weights), divided.gathered
        dtypes = {name: gather_dtype(one) for unit in divided.units for name, one in unit.parameters()}
        exact = {name: gathered.numel(name) * dtype.itemsize for name, dtype in dtypes.items()}
        texts.append(weight_text(config.weights, gathered, [(list(dtypes), shards)], exact, when, rounded))
    return texts
