"""The scripts of `examples/` run as they stand, and show what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from processes import run_python

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_look.ipynb"


def run(name: str) -> str:
    return run_python(ROOT / "examples" / name, strict=True)


def test_rules_alone_balance_loads_as_they_say() -> None:
    rows = run("routing_alone.py").splitlines()
    loads = {row[:24].strip(): [int(load) for load in re.findall(r"\d+", row[:80])[:8]] for row in rows}
    spread = {name: max(load) * 8 / sum(load) for name, load in loads.items()}
    assert set(spread) == {"token choice", "token choice, loss-free", "expert choice", "expert threshold"}
    assert spread["token choice"] > 2
    assert max(value for name, value in spread.items() if name != "token choice") < 1.5


def test_a_loop_of_one_s_own_trains_the_layer() -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run("own_loop.py"))]
    assert losses[-1] < losses[0] - 0.5


def test_a_llama_trains_with_the_layer_in_its_blocks() -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run("llama_block.py"))]
    assert losses[-1] < losses[0] - 0.5


def test_the_first_look_runs_from_top_to_bottom(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[viz]'")
    program = """if True:
        import sys, nbformat, nbclient
        notebook = nbformat.read(sys.argv[1], 4)
        nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
        kinds = [kind for cell in notebook.cells for out in cell.get("outputs", []) for kind in out.get("data", ())]
        print(kinds.count("image/png"), kinds.count("text/html"))
    """
    less = {"FIRST_LOOK": "--steps 4 --batch-size 4 --train.accumulation 1"}
    assert run_python("-c", program, NOTEBOOK, environment=less, cwd=tmp_path).split()[-2:] == ["2", "1"]


def test_the_first_look_is_saved_with_outputs_that_are_small_and_name_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert sum(bool(cell["outputs"]) for cell in cells) == 4
    assert len(text) < 300_000
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
