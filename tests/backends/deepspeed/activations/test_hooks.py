"""Hooks that take over the sums of split layers, in one process with stand-ins for layers and sums."""

import copy
import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed_compress.backends.activations.hooks import CompiledCalls, TrainingPass
from deepspeed_compress.backends.deepspeed.activations.tensor import ColumnHooks, RowHooks, SharedInput
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.monitor import Meter

WIDTH = 6


class Group:
    """Stand-in for a process group of two ranks."""

    def size(self) -> int:
        return 2


@dataclass
class Total:
    """Stand-in for the sum over two ranks that hold the same: twice the input. It counts its calls."""

    group: Any = field(default_factory=Group)
    calls: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x


class Split(nn.Linear):
    """Stand-in for a layer that AutoTP splits. With a group, it would sum by itself."""

    def __init__(self, group: Group, bias: bool = True) -> None:
        super().__init__(WIDTH, WIDTH, bias)
        self.mp_group: Group | None = group
        self.summed_itself = 0
        self.fails: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.summed_itself += self.mp_group is not None
        if self.fails is not None:
            raise self.fails
        return super().forward(x)


class Attention(nn.Module):
    """Three layers that read one tensor, or copies of it if `apart`. The layers `only` are called, in this order."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.q, self.k, self.v = (Split(group) for _ in range(3))
        self.apart, self.only = False, "qkv"

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.tanh()
        read = [getattr(self, name)(x.clone() if self.apart else x) for name in self.only]
        return torch.stack(read).sin().sum(0)


@dataclass
class Shared:
    """Attention whose layers share their input's gradient sum."""

    total: Total = field(default_factory=Total)
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Attention(self.total.group)
        self.shared = SharedInput(self.total, self.meter, 3)
        self.compiled = CompiledCalls(weakref.ref(self.model), "/key", "sums")
        self.shared.attach(self.model)
        self.hooks = [ColumnHooks(layer, self.shared, self.compiled) for layer in self.layers]
        for layer, hooks in zip(self.layers, self.hooks, strict=True):
            hooks.attach(layer)

    @property
    def layers(self) -> list[Split]:
        return [self.model.q, self.model.k, self.model.v]


def hidden() -> Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    x.grad = None
    model(x).sum().backward()
    assert x.grad is not None
    return x.grad


def plain(one: Shared) -> Attention:
    """Return a copy without our sums, as a deepcopy is."""
    return copy.deepcopy(one.model)


def test_layers_that_read_one_tensor_share_a_sum() -> None:
    one = Shared()
    x = hidden()
    assert torch.allclose(gradient(one.model, x), 2 * gradient(plain(one), hidden()))
    assert one.total.calls == 1
    assert one.meter.bytes_tensor_saved == 2 * x.nbytes
    assert [layer.summed_itself for layer in one.layers] == [0, 0, 0]
    assert all(layer.mp_group is one.total.group for layer in one.layers)


@pytest.mark.parametrize(("changes", "calls"), [({"apart": True}, 3), ({"only": "qv"}, 1)])
def test_only_reads_of_the_same_tensor_are_merged(changes: dict[str, Any], calls: int) -> None:
    one = Shared()
    vars(one.model).update(changes)
    for step in range(1, 3):
        assert torch.allclose(gradient(one.model, hidden()), 2 * gradient(plain(one), hidden()))
        assert one.total.calls == calls * step


def test_a_changed_tensor_is_another_one() -> None:
    one, x = Shared(), hidden()
    first = one.shared.read(1, x)
    with torch.no_grad():
        x.add_(1.0)
    assert one.shared.read(2, x) is not first


def test_a_layer_that_reads_a_tensor_twice_reads_it_anew() -> None:
    one = Shared()
    one.model.only = "qqkv"
    assert torch.allclose(gradient(one.model, hidden()), 2 * gradient(plain(one), hidden()))
    assert one.total.calls == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_have_one_sum(reentrant: bool) -> None:
    one = Shared()
    for _ in range(2):
        x = hidden()
        checkpoint(one.model, x, use_reentrant=reentrant).sum().backward()
        assert torch.allclose(x.grad, 2 * gradient(plain(one), hidden()))  # type: ignore[arg-type]
    assert one.total.calls == 2


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recomputed", ["q", "k", "v"])
def test_recomputation_of_one_layer_of_three(recomputed: str, reentrant: bool) -> None:
    """The layer reads the same tensor again in the backward pass, while nobody else does."""
    one = Shared()

    def run(model: Any, x: Tensor, recompute: bool) -> Tensor:
        x.grad, read = None, []
        y = x.tanh()
        for name in "qkv":
            layer = getattr(model, name)
            again = recompute and name == recomputed
            read.append(checkpoint(layer, y, use_reentrant=reentrant) if again else layer(y))
        torch.stack(read).sin().sum().backward()  # type: ignore[no-untyped-call]
        return x.grad  # type: ignore[return-value]

    expected = 2 * run(plain(one), hidden(), False)
    for _ in range(2):
        assert torch.allclose(run(one.model, hidden(), True), expected)


def test_two_backward_passes_over_one_graph() -> None:
    one = Shared()
    x = hidden()
    loss = one.model(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.allclose(x.grad, 4 * gradient(plain(one), hidden()))  # type: ignore[arg-type]


def test_backward_through_only_one_layer() -> None:
    one = Shared()
    x = hidden()
    y = x.tanh()
    read = [layer(y) for layer in one.layers]
    read[1].sum().backward()
    expected = hidden()
    plain(one).k(expected.tanh()).sum().backward()
    assert torch.allclose(x.grad, 2 * expected.grad)  # type: ignore[arg-type, operator]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_layer_leaves_nothing_behind(error: type[BaseException]) -> None:
    one = Shared()
    one.model.k.fails = error()
    with pytest.raises(error):
        one.model(hidden())
    one.model.k.fails = None
    assert torch.allclose(gradient(one.model, hidden()), 2 * gradient(plain(one), hidden()))
    assert one.total.calls == 1


def test_inputs_are_released_even_if_a_sibling_does_not_read() -> None:
    one = Shared()
    one.model.only = "qk"
    alive: list[weakref.ref[Tensor]] = []
    one.model.q.register_forward_hook(lambda layer, inputs, output: alive.append(weakref.ref(inputs[0])))
    gradient(one.model, hidden())
    gc.collect()
    assert alive[0]() is None


def test_a_copy_is_as_without_us_and_does_not_keep_the_model() -> None:
    one = Shared()
    other = plain(one)
    gradient(other, hidden())
    assert one.total.calls == 0
    assert [layer.summed_itself for layer in (other.q, other.k, other.v)] == [1, 1, 1]
    model = weakref.ref(one.model)
    del one
    gc.collect()
    assert model() is None


def test_layers_of_two_engines_are_summed_once() -> None:
    one = Shared()
    second = SharedInput(Total(one.total.group), Meter(), 3)
    for layer in one.layers:
        ColumnHooks(layer, second, one.compiled).attach(layer)
    for _ in range(2):
        assert torch.allclose(gradient(one.model, hidden()), 2 * gradient(plain(one), hidden()))
    assert all(layer.mp_group is one.total.group for layer in one.layers)


def test_detached_layers_sum_by_themselves() -> None:
    one = Shared()
    one.model.k.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        one.model(hidden())
    one.model.k.fails = None
    for hooks in one.hooks:
        hooks.detach()
    one.shared.detach()
    for layer in one.layers:
        layer.summed_itself = 0
        assert layer.mp_group is one.total.group
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
    gradient(one.model, hidden())
    assert [layer.summed_itself for layer in one.layers] == [1, 1, 1]
    assert not one.model._forward_hooks


class Model(nn.Module):
    """A model whose layer is recomputed if `reentrant` is not None."""

    def __init__(self, layer: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layer(x)  # type: ignore[no-any-return]
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@dataclass
class Row:
    """Model with one row-parallel layer, whose sums are taken over. `outer` is the model of which it is a part."""

    bias: bool = True
    outer: nn.Module | None = None
    total: Total = field(default_factory=Total)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.layer = Split(self.total.group, self.bias)
        self.model = Model(self.layer)
        if self.outer is not None:
            self.outer.layer = self.model
        self.training = TrainingPass(self.outer or self.model)
        self.compiled = CompiledCalls(weakref.ref(self.outer or self.model), "/key", "sums")
        self.hooks = RowHooks(self.layer, self.total, self.training, self.compiled)
        self.hooks.attach(self.layer)

    def expected(self, x: Tensor) -> Tensor:
        total = 2 * (x @ self.layer.weight.t())
        return total if self.layer.bias is None else total + self.layer.bias


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_summed_before_the_bias(bias: bool, reentrant: bool | None) -> None:
    row = Row(bias)
    row.model.reentrant = reentrant
    names = [name for name, _ in row.layer.named_parameters()]
    x = hidden()
    output = row.model(x)
    assert torch.allclose(output, row.expected(x))
    output.sum().backward()
    assert torch.allclose(x.grad, torch.ones_like(output) @ row.layer.weight)  # type: ignore[arg-type]
    assert row.layer.summed_itself == 0
    assert [name for name, _ in row.layer.named_parameters()] == names
    # Without reentrance, recomputation ends before the output.
    assert row.total.calls == (2 if reentrant else 1)
    if bias:
        assert torch.equal(row.layer.bias.grad, torch.full((WIDTH,), 2.0))  # type: ignore[arg-type]


def test_a_first_pass_without_gradients_is_part_of_training() -> None:
    """Reentrant checkpointing runs it so, also after an evaluation in between."""
    row = Row()
    row.model.reentrant = True
    output = row.model(hidden())
    with torch.no_grad():
        row.model(hidden())
    output.sum().backward()
    assert (row.total.calls, row.layer.summed_itself) == (2, 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_checkpoints_are_part_of_training(reentrant: bool) -> None:
    """The inner one runs without gradients in the recomputation of the outer one, too."""
    outer = Model(nn.Identity(), reentrant)
    row = Row(outer=outer)
    row.model.reentrant = True
    outer(hidden()).sum().backward()
    assert (row.total.calls, row.layer.summed_itself) == (3, 0)


def test_a_teacher_is_exact_only_outside_of_the_pass_of_its_student() -> None:
    """Inside, nothing tells it from the first pass of a reentrant checkpoint."""

    class Student(nn.Module):
        layer: nn.Module

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                taught: Tensor = self.layer(x)
            return x * taught

    student = Student()
    row = Row(outer=student)
    with torch.no_grad():
        row.model(hidden())
    assert (row.total.calls, row.layer.summed_itself) == (0, 1)
    student(hidden()).sum().backward()
    assert (row.total.calls, row.layer.summed_itself) == (1, 1)


def test_a_part_that_is_called_by_itself_is_trained() -> None:
    row = Row(outer=Model(nn.Identity()))
    row.model.reentrant = True
    row.model(hidden()).sum().backward()
    assert (row.total.calls, row.layer.summed_itself) == (2, 0)
    with torch.no_grad():
        row.model(hidden())
    assert (row.total.calls, row.layer.summed_itself) == (2, 1)


@pytest.mark.parametrize("part", ["layer", ""])
def test_a_compiled_part_is_refused_before_the_next_step(part: str) -> None:
    row = Row()
    row.model.get_submodule(part).compile(backend="eager")
    with torch.no_grad():
        row.model(hidden())
    row.compiled.before_step()
    row.model(hidden())
    assert row.total.calls == 0
    with pytest.raises(UnsupportedError, match=f"sums inside a compiled graph .* do not compile {part or 'the model'}"):
        row.compiled.before_step()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch hides this warning, which is an error here
def test_compiled_siblings_are_refused_before_the_next_step() -> None:
    one = Shared()
    forward = torch.compile(one.model, backend="eager")
    gradient(forward, hidden())
    with pytest.raises(UnsupportedError, match="do not compile the model, or remove the key"):
        one.compiled.before_step()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_row_leaves_group_and_bias(error: type[BaseException]) -> None:
    row = Row()
    row.layer.fails = error()
    with pytest.raises(error):
        row.model(hidden())
    # A program may save the model in between.
    assert [name for name, _ in row.layer.named_parameters()] == ["weight", "bias"]
    row.layer.fails = None
    x = hidden()
    assert torch.allclose(row.model(x), row.expected(x))
    assert row.layer.mp_group is row.total.group
    assert row.layer.bias is not None


def test_a_call_with_other_weights_sums() -> None:
    """The tensors in place of parameters are no parameters."""
    row, x = Row(), hidden()
    weights = {name: 2 * parameter.detach() for name, parameter in row.model.named_parameters()}
    assert torch.allclose(torch.func.functional_call(row.model, weights, x), 2 * row.expected(x))
    assert row.total.calls == 1


def interrupted_row() -> Row:
    """Return a row whose last forward pass was interrupted in its layer."""
    row = Row()
    row.layer.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        row.model(hidden())
    row.layer.fails = None
    return row


def test_an_evaluation_after_an_interrupt_sums() -> None:
    row = interrupted_row()
    with torch.no_grad():
        row.model(hidden())
    assert (row.layer.summed_itself, row.total.calls) == (1, 0)
    assert row.layer.bias is not None


def test_detaching_from_a_row_restores_it() -> None:
    row = interrupted_row()
    row.hooks.detach()
    row.training.detach()
    row.model(hidden())
    assert row.layer.summed_itself == 1
    assert row.layer.bias is not None
    assert not row.model._forward_hooks
    assert not row.layer._forward_hooks
