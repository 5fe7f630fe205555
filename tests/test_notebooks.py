"""Every notebook runs from top to bottom, its sliders too, defines nothing and is stored without outputs."""

import ast
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
# Moves every control to its end. An error in a slider's function shows in its output and stops no cell; no new figure tells.
MOVE_EVERY_SLIDER = """
import ipywidgets

moved = 0
shown = [value for value in list(globals().values()) if isinstance(value, ipywidgets.interactive)]
for panel in {id(panel): panel for panel in shown}.values():  # Out has them a second time
    if panel.result is None:
        panel.f(**panel.kwargs)  # raises what the first drawing swallowed
    for control in panel.kwargs_widgets:
        if hasattr(control, "options"):
            end = control.options[-1][1] if isinstance(control.options[-1], tuple) else control.options[-1]
        else:
            end = control.base**control.max if hasattr(control, "base") else control.max
        before, control.value = panel.result, end
        if panel.result is before:
            panel.f(**panel.kwargs)  # likewise
        assert panel.result is not before, (control.description, end)
        moved += 1
print(moved)
"""


def code_of(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [ast.parse(TransformerManager().transform_cell(cell.source)) for cell in cells]


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["02_muonclip.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_defines_nothing(path):
    """Functions and classes belong to the packages. A lambda may stand where it is handed over, and has no name."""
    for tree in code_of(nbformat.read(path, as_version=4)):
        nodes = list(ast.walk(tree))
        defined = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
        assert not defined
        handed = {id(value) for node in nodes if isinstance(node, ast.Call) for value in node.args}
        assert all(id(node) in handed for node in nodes if isinstance(node, ast.Lambda))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_installs_in_colab_alone(path):
    notebook = nbformat.read(path, as_version=4)
    (install,) = [cell for cell in notebook.cells if "pip" in cell.source]
    (branch,) = [
        node for node in ast.parse(TransformerManager().transform_cell(install.source)).body if isinstance(node, ast.If)
    ]
    assert ast.unparse(branch.test) == "'google.colab' in sys.modules and importlib.util.find_spec('k2jax') is None"
    assert "'pip'" in ast.unparse(branch) and install is next(cell for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom_and_every_slider_moves(path):
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(MOVE_EVERY_SLIDER))
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    # By default nbclient answers every output of a slider with a message to the busy kernel, and one run in four the two then
    # wait for each other for ever. Unanswered, those outputs belong to the cell, errors in them too.
    client.comm_open_handlers = {"jupyter.widget": lambda message: None}
    client.execute()
    sliders = sum(cell.source.count("continuous_update=False") for cell in notebook.cells[:-1])
    assert int(notebook.cells[-1].outputs[-1].text) > sliders > 0  # there are menus too
    for cell in notebook.cells:
        assert not [output for output in cell.get("outputs", []) if output.output_type == "error"]
