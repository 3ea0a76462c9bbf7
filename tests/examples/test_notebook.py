"""The notebook of the examples runs from its first cell to its last, in a real kernel."""

import ast
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "train.ipynb"


@pytest.mark.slow
def test_an_agent_is_trained_measured_and_exported_from_a_notebook(tmp_path: Path) -> None:
    shutil.copy(NOTEBOOK, tmp_path)
    notebook = nbformat.read(tmp_path / "train.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]
    dev, trained, measured, exported = shown
    outcomes, calls_trained, left_out = ast.literal_eval(dev)
    assert outcomes == {"succeeded": 4} and calls_trained + sum(left_out.values()) == 4  # groups may be flat
    assert trained.count(",") == 3 and "None" not in trained
    assert measured.startswith("(6, ")  # all tasks that were given
    assert exported == "PosixPath('my-model')" and (tmp_path / "my-model" / "model.safetensors").exists()
