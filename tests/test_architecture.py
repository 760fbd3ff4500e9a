"""The directions of imports inside the package, and what may be imported at all, checked on the source text."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "expert_threshold"
SOURCE = ROOT / "src" / PACKAGE
MODULES = sorted(SOURCE.rglob("*.py"))

ORDER = (
    "errors", "files", "glossary", "install", "option", "kernels", "routing", "optim", "data", "moe", "model",
    "__init__", "runs", "evaluation", "generate", "serve", "distributed", "train", "recipes", "analysis",
    "integrations", "config", "plan", "full_run", "compare", "testing", "cli", "__main__",
)  # fmt: skip
"""Each may import only those before it, as docs/tour.md says."""
MAY_IMPORT = {name: set(ORDER[:place]) for place, name in enumerate(ORDER)}
MAY_IMPORT |= {"kernels": set(), "routing": {"option"}}  # they know nothing else of the package

# Packages that are not there on every machine, and the files that exist for each: only those may import the package at
# their top level. All others import it inside the function that needs it.
HOMES: dict[str, set[str]] = {
    **{key: set() for key in ("huggingface_hub", "matplotlib", "optuna", "scipy", "tensorboard", "trackio", "wandb")},
    "lm_eval": {"integrations/lm_eval.py"},
    "pydantic": {"serve/completion.py", "serve/explorer.py", "serve/openapi.py"},
    "starlette": {"serve/explorer.py", "serve/server.py"},
    "tokenizers": {"integrations/transformers.py"},
    "torch.utils.tensorboard": set(),
    "transformers": {"integrations/transformers.py"},
    "triton": {"kernels/gpu/cross_entropy.py", "kernels/gpu/experts.py", "routing/radix.py"},
    "uvicorn": {"serve/connections.py"},
}
ONLY_IN_INTEGRATIONS = {"lm_eval", "transformers"}
RUNS_CODE_ON_LOAD = {"dill", "joblib", "marshal", "pickle", "shelve"}
# The distributions' names are their import names, here, but for PyYAML.
CORE = {"yaml"} | {
    re.split(r"[^\w-]", requirement)[0].replace("-", "_")
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
}


class Import(NamedTuple):
    name: str  # dotted and absolute, down to the imported name
    line: int
    on_import: bool  # run when the module is imported, as opposed to inside a function or for the type checker


def imports(tree: ast.AST, package: list[str], on_import: bool = True) -> Iterator[Import]:
    """Every import below `tree`; `package` is the dotted package that relative imports start from."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, on_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = [*base, *([node.module] if node.module else [])]
            yield from (Import(".".join([*origin, alias.name]), node.lineno, on_import) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(node.body, []), package, on_import=False)
            yield from imports(ast.Module(node.orelse, []), package, on_import)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(node, package, on_import and not inside)


def violations(file: str, source: str) -> list[str]:
    """Return the imports of `file` (its path inside the package) that break the rules."""
    parts = file.removesuffix(".py").split("/")
    component = parts[0]
    if component not in MAY_IMPORT:
        return [f"{file}: {component} has no line in MAY_IMPORT"]
    found = []
    for name, line, on_import in imports(ast.parse(source), [PACKAGE, *parts[:-1]]):
        where = f"{file}:{line}: "
        top = name.split(".")[0]
        optional = [package for package in HOMES if f"{name}.".startswith(f"{package}.")]
        if top == PACKAGE:
            target = [*name.split("."), "__init__"][1]
            # A name that is no component is an attribute of the package itself, such as __version__.
            at_once = component == "__init__" and on_import  # which would make `import expert_threshold` slow
            allowed = {component, "__init__"} | (set() if at_once else MAY_IMPORT[component])
            if target in MAY_IMPORT and target not in allowed:
                found.append(f"{where}{component} may not import {target}")
        elif top in RUNS_CODE_ON_LOAD:
            found.append(f"{where}{top} runs code when it loads a file")
        elif top in ONLY_IN_INTEGRATIONS and component != "integrations":
            found.append(f"{where}only integrations may import {top}")
        elif optional:
            if on_import and file not in set.union(*(HOMES[package] for package in optional)):
                found.append(f"{where}{optional[0]} is optional: import it inside the function that needs it")
        elif top not in CORE | sys.stdlib_module_names:
            found.append(f"{where}{top} is neither a dependency nor in HOMES")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    assert violations(path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("routing/rule.py", "import expert_threshold.moe"),
        ("routing/rule.py", "from expert_threshold import moe"),
        ("routing/rule.py", "from .. import data"),
        ("routing/__init__.py", "from ..moe import MoE"),
        ("moe/backends/grouped.py", "from ...model import GPT"),
        ("model/gpt.py", "def f():\n    from expert_threshold.runs import RunFolder"),
        ("model/gpt.py", "if TYPE_CHECKING:\n    from expert_threshold.config import Config"),
        ("config.py", "from .cli import main"),
        ("__init__.py", "from .model import GPT"),
        ("novelty/new.py", ""),
        ("evaluation/core.py", "def f():\n    import lm_eval"),
        ("analysis/report.py", "try:\n    import matplotlib\nexcept ImportError:\n    pass"),
        ("train/log.py", "from torch.utils import tensorboard"),
        ("train/log.py", "class Log:\n    import trackio"),
        ("train/log.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import trackio"),
        ("runs/folder.py", "import pickle"),
        ("optim/muon.py", "def f():\n    import pandas"),
    ],
)
def test_a_forbidden_import_is_noticed(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


def test_importing_every_module_opens_no_socket() -> None:
    names = [
        ".".join([PACKAGE, *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")
        for path in MODULES
        if path.relative_to(SOURCE).as_posix() not in set.union(*HOMES.values())
    ]
    program = """
        import sys, importlib
        def refuse(event, arguments):
            if event.startswith("socket."):
                raise RuntimeError(f"{event} {arguments}")
        sys.addaudithook(refuse)
        for name in sys.argv[1:]:
            importlib.import_module(name)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), *names], check=True, timeout=120)


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, expert_threshold; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_a_newcomer_needs_comes_from_the_top() -> None:
    import expert_threshold

    for name in expert_threshold.__all__:
        assert getattr(expert_threshold, name).__name__ == name
        assert name in dir(expert_threshold)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = expert_threshold.nothing


def test_nothing_is_read_or_written_with_pickle() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "torch.save"}), path


def test_a_token_is_decoded_by_the_model_itself() -> None:
    """A second model stood in generate/, and every change to the first had to be made there, too."""
    products = {"addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "scaled_dot_product_attention"}
    for path in [path for path in MODULES if path.relative_to(SOURCE).parts[0] in ("generate", "serve")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
            assert called not in products, path
            assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), path
