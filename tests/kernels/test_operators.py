"""The operators' types in C++ match their signatures in Python, which torch does not check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from expert_threshold.kernels import cpu
from expert_threshold.kernels.cpu import blocks, decode

MODULES = (blocks, decode)
SOURCES = sorted(Path(cpu.__file__).parent.glob("*.cpp"))
TYPES = {
    "void": "", "bool": "bool", "int64_t": "int", "double": "float", "Tensor": "Tensor",
    "MaybeTensor": "Optional[Tensor]", "std::optional<Tensor>": "Optional[Tensor]",
    "std::vector<int64_t>": "List[int]", "std::vector<double>": "List[float]", "std::vector<Tensor>": "List[Tensor]",
}  # fmt: skip


def operators() -> dict[str, tuple[str, list[str], list[str]]]:
    """Return each operator's source, and the types of its parameters and results in C++."""
    found = {}
    for file in SOURCES:
        text = file.read_text()
        for name, function in re.findall(r'm\.impl\("(\w+)", TORCH_BOX\(&(\w+)\)\)', text):
            declared = re.findall(rf"^(\S.*) {function}\(([^)]*)\) {{", text, re.MULTILINE)
            results, parameters = declared[-1]
            results = re.sub(r"^std::tuple<(.*)>$", r"\1", results).split(", ")
            kinds = [re.sub(r"^const |&? \w+$", "", " ".join(each.split())) for each in parameters.split(",")]
            found[name] = file.name, kinds, results
    return found


def test_every_source_implements_operators() -> None:
    """Otherwise, the next test would pass without checking any operator."""
    assert {file for file, *_ in operators().values()} == {file.name for file in SOURCES}


@pytest.mark.parametrize("name", operators())
def test_parameters_and_results_have_the_types_of_the_signature(name: str) -> None:
    """A number that C++ reads as a tensor crashes at best."""
    _, parameters, results = operators()[name]
    (operator,) = (getattr(module, name) for module in MODULES if hasattr(module, name))
    schema = operator._schema
    assert [TYPES[kind] for kind in parameters if kind] == [str(argument.type) for argument in schema.arguments]
    assert [TYPES[kind] for kind in results if kind != "void"] == [str(result.type) for result in schema.returns]
