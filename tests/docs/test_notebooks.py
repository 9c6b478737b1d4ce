"""The notebooks of the docs, run in a real kernel."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip(
    "nbclient", reason="the environment is older than this test: make brings nbclient"
)
pytest.importorskip("ipykernel", reason="as above")
nbformat = pytest.importorskip("nbformat", reason="as above")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
# What a notebook shows as HTML, in order, by the beginning of its plain representation.
SHOWN = {
    "first_program": [
        "Engine(",
        "SglFunction(",
        "ProgramState(",
        "Selection(",
        "Confidence(",
        "Engine(",
    ],
    "branches": ["ProgramState(", "Trace(", "Graph("],
    "batches": ["BatchResults(", "Usage("],
}


def test_each_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS} == SHOWN.keys()


@pytest.mark.filterwarnings("ignore")  # of the kernel's client
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_html_and_writes_nothing_in_red(path, model_file):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    # none are committed
    assert not [cell.outputs for cell in notebook.cells if cell.get("outputs")]
    # an error of a cell is raised
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    results = [output.data for output in outputs if output.output_type == "execute_result"]
    shown = [data["text/plain"] for data in results if "text/html" in data]
    assert [plain.partition("(")[0] + "(" for plain in shown] == SHOWN[path.stem]
    assert all(len(plain) <= 300 for plain in shown)
