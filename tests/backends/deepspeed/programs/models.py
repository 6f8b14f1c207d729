"""Small models, each with one unusual property of a training program."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.backends.deepspeed.programs.program import WIDTH


def network() -> nn.Sequential:
    """Return a model whose sizes are not divisible by 2 or any block size.

    Some parameters have fewer elements than ranks.
    """
    return nn.Sequential(
        nn.Linear(WIDTH, 31), nn.ReLU(), nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 3), nn.Linear(3, 1, bias=False)
    )


class Branches(nn.Module):
    """Body and head with branches between them. Each call names the branches that it uses."""

    def __init__(self, branches: int = 2) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 17)
        self.branches = nn.ModuleList(nn.Linear(17, 17) for _ in range(branches))
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor, take: Sequence[int] = (0,)) -> Tensor:
        x = self.body(x)
        for index in take:
            x = x + torch.tanh(self.branches[index](x))
        return self.head(x)


class Chosen(nn.Module):
    """Layers of which each call uses one, given by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(2))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return torch.tanh(self.layers[number % 2](x))


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.chosen, self.head = nn.Linear(WIDTH, 17), Chosen(), nn.Linear(17, 1)

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.head(self.chosen(self.body(x), number))


class Late(nn.Module):
    """Model whose first layer, and so the first parameter, gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 17)
        self.second = nn.Linear(17, 17)
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(self.first(x).detach())))


class Checkpointed(nn.Module):
    """Layer used by two activation checkpoints, and a tail with weights of its own."""

    def __init__(self, reentrant: bool, layers: int = 1) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 17)
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(layers))
        self.head = nn.Linear(17, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.head(x)


class Adapted(nn.Module):
    """Frozen matrix with a trained matrix of low rank."""

    def __init__(self, wide: int = 17, reentrant: bool | None = None) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, wide).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, wide, bias=False)
        self.head = nn.Linear(wide, 1)
        self.reentrant = reentrant

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.head(self.hidden(x))
        x = x.detach().requires_grad_(True)
        return self.head(checkpoint(self.hidden, x, use_reentrant=self.reentrant))


class Kept(nn.Linear):
    """Layer whose forward fails if a bit of its weight has changed since it was made."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.given = self.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        assert torch.equal(self.weight, self.given), "frozen weights were changed"
        return super().forward(x)


class Packed(nn.Module):
    """Frozen matrix of packed codes in `storage`. Forward fails if a bit has changed."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.given = torch.randint(0, 256, (17, WIDTH), dtype=torch.uint8)
        self.codes = nn.Parameter(self.given.clone().view(storage), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes.detach().view(torch.uint8)
        assert torch.equal(codes, self.given), "packed codes were changed"
        return x @ ((codes.to(x.dtype) - 128) / 512).t()


class Quantized(nn.Module):
    """Matrix of packed codes and a frozen matrix of numbers, with a trained matrix of low rank, as in QLoRA.

    The numbers come first, because ZeRO 3 takes the type of the first parameter for that of the model.
    """

    def __init__(self, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.base = Kept(17, 17).requires_grad_(False)
        self.codes = Packed(storage)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 17, bias=False)
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(self.codes(x) + self.up(self.down(x)))))


class Scripted(nn.Module):
    """Model with a part that `torch.jit.script` has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 17)
        self.scripted = torch.jit.script(nn.Linear(17, 17))
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scripted(self.inputs(x))))


class Words(nn.Module):
    """Embedding whose rows are chosen by the signs of the input. The head may be tied to it."""

    def __init__(self, rows: int = 40, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, WIDTH, sparse=sparse)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, rows, bias=False)
        self.head = nn.Linear(rows, 1)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, :5] > 0).long() @ torch.tensor([16, 8, 4, 2, 1])
        return self.head(torch.tanh(self.output(torch.tanh(self.body(self.embedding(rows) + x)))))


class Nested(nn.Module):
    """Module that occurs under two names, one of them inside another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 17)
        self.first = nn.Linear(17, 17)
        self.inner = nn.Sequential(self.first, nn.ReLU(), nn.Linear(17, 17))
        self.head = nn.Linear(17, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.tanh(self.first(self.inputs(x)))))


class Odd(nn.Module):
    """Linear layer with additional parameters of unusual shapes, all of which are used."""

    def __init__(self, *sizes: Sequence[int]) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, 1)
        self.odd = nn.ParameterList(nn.Parameter(torch.randn(tuple(size))) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.odd:
            x = x * (1 + parameter.sum() / 10)
        return self.body(x)


class Returning(nn.Module):
    """Model whose submodules return dictionaries and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _InDictionary()
        self.head = _InTuple()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)["hidden"])[0]


class _InDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 17)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": torch.tanh(self.linear(x)), "input": x}


class _InTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(17, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linear(x), None
