"""The notebook of the documentation runs as it is, and has no outputs in the repository."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/notebooks/first_run.ipynb"


def code_cells(notebook: dict[str, Any]) -> dict[str, Any]:
    return {cell["id"]: cell for cell in notebook["cells"] if cell["cell_type"] == "code"}


def test_the_notebook_has_no_outputs() -> None:
    cells = code_cells(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    assert len(cells) > 5
    assert [name for name, cell in cells.items() if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs Jupyter, which the extras leave to the user. pip fetches the corpus, or Python's manual is used."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install nbclient ipykernel")
    nbformat = pytest.importorskip("nbformat")
    for name in ("configs", "launch", "deepspeed_compress"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = code_cells(notebook)
    assert "DSC100" in cells["lint"]["outputs"][0]["text"]
    assert "image/png" in cells["picture"]["outputs"][0]["data"]
    plain, compressed = (summary(tmp_path / "runs/first_run" / name) for name in ("none", "int4"))
    assert compressed["eval_loss"] == pytest.approx(plain["eval_loss"], rel=0.05)
    assert compressed["bytes_sent_per_step"] < plain["bytes_sent_per_step"] / 2


def summary(run: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return figures
