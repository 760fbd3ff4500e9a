"""The embedded corpus: Python's standard library, as source code and as documentation in prose."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Modules and packages of every Python from 3.11 to 3.14, except tests and `encodings`, which consists of tables of
# numbers. Some distributions remove modules such as tkinter and idlelib; missing modules are skipped.
MODULES = """
    __future__ _aix_support _collections_abc _compat_pickle _markupbase _osx_support _py_abc _pydecimal _pyio
    _sitebuiltins _strptime _threading_local _weakrefset abc antigravity argparse ast asyncio base64 bdb bisect bz2
    cProfile calendar cmd code codecs codeop collections colorsys compileall concurrent configparser contextlib
    contextvars copy copyreg csv ctypes curses dataclasses datetime dbm decimal difflib dis doctest email enum filecmp
    fileinput fnmatch fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip hashlib heapq
    hmac html http idlelib imaplib importlib inspect io ipaddress json keyword linecache locale logging lzma mailbox
    mimetypes modulefinder multiprocessing netrc ntpath numbers opcode operator optparse os pathlib pdb pickle
    pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc queue
    quopri random re reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil signal site smtplib socket
    socketserver sqlite3 ssl stat statistics string stringprep struct subprocess symtable sysconfig tabnanny tarfile
    tempfile textwrap this threading timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle
    turtledemo types typing unittest urllib uuid venv warnings wave weakref webbrowser wsgiref xml xmlrpc zipapp
    zipfile zipimport zoneinfo
"""
TOPICS = "pydoc_data/topics.py"
_TESTS = {"test", "tests", "idle_test"}

VALIDATION_SHARE = 0.05
VALIDATION_BYTES = 400_000
"""The maximum size of the validation split, which keeps a validation to a few seconds."""
VALIDATION_FILE_BYTES = 50_000
"""Larger files are used for training, so that no single module dominates the validation loss."""

Document = tuple[str, str]
"""A document's name, which is unique in the corpus, and its text."""


def documents(stdlib: Path | None = None) -> tuple[list[Document], list[Document]]:
    """Return the training documents and the validation documents, both in a fixed order.

    They come from `stdlib`, by default the running Python's. The source of a file and its docstrings are two documents
    of the same split. The topics of `pydoc_data`, which quote each other, share a split too. Duplicates are dropped.
    """
    root = Path(sysconfig.get_path("stdlib")) if stdlib is None else stdlib
    files: dict[str, list[Document]] = {}
    seen: set[str] = set()
    for name in _names(root):
        found = [(title, text) for title, text in _documents(name, (root / name).read_bytes()) if text not in seen]
        seen.update(text for _, text in found)
        files[name] = found
    sizes = {name: sum(len(text.encode()) for _, text in found) for name, found in files.items()}
    room = min(VALIDATION_BYTES, int(VALIDATION_SHARE * sum(sizes.values())))
    validation = set()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= min(room, VALIDATION_FILE_BYTES):
            validation.add(name)
            room -= sizes[name]
    return (
        [document for name, found in files.items() if name not in validation for document in found],
        [document for name, found in files.items() if name in validation for document in found],
    )


def _names(root: Path) -> Iterator[str]:
    """Yield the paths of existing files, relative to `root`."""
    for module in MODULES.split():
        if (root / f"{module}.py").is_file():
            yield f"{module}.py"
        paths = (path.relative_to(root) for path in (root / module).rglob("*.py"))
        yield from sorted(path.as_posix() for path in paths if not _TESTS.intersection(path.parts))
    if (root / TOPICS).is_file():
        yield TOPICS


def _documents(name: str, data: bytes) -> list[Document]:
    source = importlib.util.decode_source(data)
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(source)
    if name == TOPICS:  # its only dictionary is in `topics = {name: text, ...}`
        (topics,) = [
            node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        ]
        found = [(f"{name}#{topic}", text) for topic, text in ast.literal_eval(topics).items()]
    else:
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found = [(name, source), (f"{name}#docstrings", "\n\n\n".join(_docstrings(tree, module)))]
    return [(name, text) for name, text in found if text.strip()]


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[str]:
    """Yield each docstring with its dotted name, in source order."""
    text = ast.get_docstring(node)
    if text:
        yield f"{name}\n\n{text}"
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
