"""FSDP2 of other versions of torch is refused by name."""

import importlib
import sys

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_api

from deepspeed_compress.errors import SeamError

PACKAGE = "deepspeed_compress.backends.fsdp2"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import the backend again, whichever test has imported it before."""
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        ("2.7.1", SeamError, r"PyTorch 2\.7\.1 is installed.*torch >=2\.13"),
        ("2.13.0", ImportError, "ReduceScatter"),
    ],
    ids=["older", "known"],
)
def test_a_torch_without_the_names_that_are_imported(
    monkeypatch: pytest.MonkeyPatch, forgotten: None, version: str, error: type[Exception], message: str
) -> None:
    """An older version is named; of a known one, the missing name is."""
    monkeypatch.delattr(_fsdp_api, "ReduceScatter")
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(error, match=message):
        importlib.import_module(PACKAGE)
