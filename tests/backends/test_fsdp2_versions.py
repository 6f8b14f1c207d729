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


def test_a_torch_without_the_names_that_are_imported(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    monkeypatch.delattr(_fsdp_api, "ReduceScatter")
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    with pytest.raises(SeamError, match=r"PyTorch 2\.7\.1 is installed.*torch >=2\.13"):
        importlib.import_module(PACKAGE)


def test_a_known_torch_without_the_names_shows_which_is_missing(
    monkeypatch: pytest.MonkeyPatch, forgotten: None
) -> None:
    monkeypatch.delattr(_fsdp_api, "ReduceScatter")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with pytest.raises(ImportError, match="ReduceScatter"):
        importlib.import_module(PACKAGE)
