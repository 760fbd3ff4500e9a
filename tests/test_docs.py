"""Every block of every page is run, in order, in a fresh folder, by models that take no time, or says why it is not.

A block is either indented, and then typed into a shell, or fenced, and then of the language that its fence names. The
line `<!-- not run: REASON -->` before it leaves it out. Commands are understood as they are printed: only the run that
they mean is made small, afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cases import TEXT, write_shards
from expert_threshold import full_run
from expert_threshold.cli import analyze, calibrate, compare, generate, main, plan, retrofit, train
from expert_threshold.cli import sweep as sweep_command
from expert_threshold.compare import sweep
from expert_threshold.config import RunConfig
from expert_threshold.data import embedded

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "log").glob("*.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
REASON = re.compile(r"<!-- not run: (.+) -->")
COMMAND = re.compile(r"(\S+=\S+ )?(et|make|pip|python|curl|torchrun|lm_eval) ")
SERVED = "http://127.0.0.1:8000"


class Block(NamedTuple):
    line: int
    language: str  # "shell" of one that is indented
    text: str
    reason: str | None  # why it is not run


def blocks(page: str) -> list[Block]:
    """The blocks of a page. Raises ValueError for a reason without a block."""
    found: list[Block] = []
    lines = page.splitlines()
    place, reason = 0, None
    while place < len(lines):
        start, line = place, lines[place]
        place += 1
        language = None
        if said := REASON.fullmatch(line):
            reason = said[1]
            continue
        if line.startswith("```"):
            language = line.removeprefix("```")
            end = lines.index("```", place)
            body, place = lines[place:end], end + 1
        elif line.startswith("    ") and not lines[start - 1]:
            language = "shell"
            while place < len(lines) and (lines[place].startswith("    ") or not lines[place]):
                place += 1
            body = [each.removeprefix("    ") for each in lines[start:place]]
        if language is not None:
            found.append(Block(start + 1, language, "\n".join(body).strip("\n"), reason))
            reason = None
        elif line and reason is not None:
            raise ValueError(f"line {start + 1}: a reason stands before what is no block")
    return found


def unfit(block: Block) -> str | None:
    """Why a block can neither be run nor be left out."""
    if block.reason is not None:
        return None
    if block.language not in ("shell", "python", "text"):
        return f"language {block.language!r} is not run; say why, or use text"
    if block.language == "text" and (command := COMMAND.search("\n" + block.text + "\n")):
        return f"text that holds a command, {command[0]}: indent it"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_can_be_run_or_says_why_it_is_not(page: Path) -> None:
    found = blocks(page.read_text(encoding="utf-8"))
    assert [f"{page.name}:{block.line}: {why}" for block in found if (why := unfit(block))] == []


def test_every_record_is_cited_by_a_page_and_every_path_a_page_names_is_there() -> None:
    """Records of presets long gone lay there, and pages named files that had moved."""
    folder = ROOT / "docs" / "results"
    cited: set[Path] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
        named = [ROOT / path.rstrip(".") for path in re.findall(r"docs/(?:results|log)/[\w./-]+", text)]
        assert [str(path) for path in [*links, *named] if not path.exists()] == [], page.name
        for link, anchor in re.findall(r"\]\(((?:[^)#:]+\.md)?)#([^)]+)\)", text):
            headings = re.findall(r"(?m)^#+ (.+)$", (page.parent / link if link else page).read_text(encoding="utf-8"))
            assert anchor in [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings], page.name
        cited |= {path.resolve() for path in [*links, *named]}
    for path in folder.rglob("*"):
        within = [each for each in (path, *path.parents) if folder in each.parents]
        assert path.is_dir() or not cited.isdisjoint(within), f"{path}: cited by no page"


def test_every_benchmark_is_named_by_a_page_or_run_by_one_that_is() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page.parent.name != "log"]
    files = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks" / "evidence").glob("*.py")]
    programs = {path: path.read_text(encoding="utf-8") for path in files if not path.name.startswith("_")}
    for path in programs:
        others = [text for other, text in programs.items() if other != path]
        assert any(re.search(rf"\b{path.stem}\b", text) for text in [*pages, *others]), path


def small(config: RunConfig) -> RunConfig:
    """The same run in four steps of a tiny model."""
    rule = config.model.rule
    if rule is not None and "warmup_steps" in vars(rule):
        rule = replace(rule, warmup_steps=min(vars(rule)["warmup_steps"], 2))
    sizes = {"vocab_size": 270, "context": 32, "layers": 2, "d_model": 16, "heads": 2, "kv_heads": 2}
    every = {name: 2 for name in ("eval_every", "checkpoint_every") if vars(config.train)[name] is not None}
    loop = {"steps": 4, "batch_size": 2, "accumulation": 1, "eval_tokens": 128, "log_every": 1, "sample_every": None}
    return replace(
        config,
        model=replace(config.model, **sizes, d_expert=16, d_feed_forward=32, rule=rule),
        train=replace(config.train, **loop, **every),
    )


# What commands other than those that train are asked for at most.
LESS = {"tokens": 128, "max_tokens": 4, "distill_routers": 2}
# Of all figures; the others have tests of their own.
FIGURES = ("loss_by_method", "passage_intensity", "load_balance")


def asked_less(parse: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def parse_less(*arguments: Any) -> dict[str, Any]:
        given = parse(*arguments)
        return given | {name: min(given.get(name, most), most) for name, most in LESS.items()}

    return parse_less


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh folder with what the pages call the reader's own. All that is trained there is small."""
    folder = tmp_path / "fresh"
    question = json.dumps({"question": TEXT, "answer": TEXT}) + "\n"
    program = json.dumps({"prompt": TEXT, "canonical_solution": TEXT}) + "\n"
    for path, text in {
        "human_eval.jsonl": program,
        "DATA/human_eval/test.jsonl": program,
        "DATA/gsm8k/test.jsonl": question,
        "DATA/textbooks/test.txt": TEXT,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text * 9)
    write_shards(folder / "FOLDER", [TEXT * 20] * 18, 2)
    monkeypatch.chdir(folder)

    texts = [(f"{number}.py", f"# {number}\n" + TEXT * 20) for number in range(20)]
    monkeypatch.setattr(embedded, "documents", lambda: (texts[2:], texts[:2]))
    resolve_run = train.resolve_run
    for module in (train, compare):
        monkeypatch.setattr(module, "resolve_run", lambda given: small(resolve_run(given)))
    monkeypatch.setattr(plan, "resolve_run", lambda given: resolve_run({**given, "model.layers": 2}))  # takes no time
    for module in (train, sweep):
        monkeypatch.setattr(module, "tokens_within", lambda *_: 10**7)
    few = [option._replace(default=2) if option.name == "trials" else option for option in sweep_command.OPTIONS]
    monkeypatch.setattr(sweep_command, "OPTIONS", few)
    steps_of = full_run.train
    monkeypatch.setattr(full_run, "train", lambda *given, **more: steps_of(*given, **more | {"minutes": None}))
    monkeypatch.setattr(full_run, "write_report", lambda folder: None)
    chosen = analyze.chosen_studies
    monkeypatch.setattr(analyze, "chosen_studies", lambda text: [s for s in chosen(text) if s.name in FIGURES])
    for module in (analyze, calibrate, generate, retrofit):
        monkeypatch.setattr(module, "parse_all", asked_less(module.parse_all))
    return folder


class Reader:
    """Does what a page says. url: where a server that it started listens; servers end with the reader."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.names: dict[str, Any] = {"__name__": page}
        self.url: str | None = None
        self.end = contextlib.ExitStack()

    def do(self, block: Block) -> None:
        if block.language == "python":
            # Two steps are enough here; tests/moe/test_follow.py takes all of them.
            text = re.sub(r"^STEPS = \d+$", "STEPS = 2", block.text, flags=re.MULTILINE)
            exec(compile(self.here(text), f"{self.page}:{block.line}", "exec"), self.names)
        elif block.language == "shell":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(self.here(line), comments=True):
                    self.type(words)

    def here(self, text: str) -> str:
        return text if self.url is None else text.replace(SERVED, self.url)

    def type(self, words: list[str]) -> None:
        match words:
            case ["et", *arguments]:
                said = io.StringIO()
                with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                    code = main(arguments)
                assert code == 0, f"{shlex.join(words)}: {said.getvalue()[-600:]}"
            case ["pip", "install", "-e", clone]:
                extra = re.fullmatch(r"\.\[(\w+)\]", clone)
                assert extra, words
                assert extra[1] in EXTRAS, words
            case ["curl", *arguments]:
                assert self.url is not None, "nothing is served"
                if shutil.which("curl") is None:
                    pytest.skip("this machine has no curl")
                subprocess.run(["curl", "--fail", *arguments], check=True, timeout=60, capture_output=True)
            case _:
                raise AssertionError(f"no way to run {shlex.join(words)}; say in the page why it is not run")

    def serve(self, app: Any, sockets: Any) -> None:
        """Stands in for a server that runs until it is interrupted, after ending the one before it."""
        from served import running

        self.close()
        kept = [each.dup() for each in sockets]  # the command closes its own
        self.url = self.end.enter_context(running(app, kept)).url

    def close(self) -> None:
        self.end.close()
        self.url = None


@pytest.fixture
def reader(request: pytest.FixtureRequest, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    reader = Reader(request.node.name)
    if importlib.util.find_spec("uvicorn") is not None:
        from expert_threshold.serve import connections

        bind = connections.bind
        monkeypatch.setattr(connections, "run_server", reader.serve)
        monkeypatch.setattr(connections, "bind", lambda host, port: bind(host, 0))  # 8000 may be somebody's
    yield reader
    reader.close()


def needs(text: str) -> list[str]:
    """The packages, not there on every machine, without which a page cannot be followed."""
    packages = {"et serve": "uvicorn", "openai": "openai", "et analyze": "matplotlib", "et sweep": "optuna"}
    packages |= {"from transformers": "transformers", "Trainer": "accelerate"}
    return [package for word, package in packages.items() if word in text]


RUN = {page: [block for block in blocks(page.read_text(encoding="utf-8")) if block.reason is None] for page in PAGES}
assert RUN[PAGES[0]], "no blocks are found"


@pytest.mark.parametrize("page", [page for page, run in RUN.items() if run], ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # of Trainer where no GPU is
def test_the_blocks_of_a_page_run_in_order_in_a_fresh_folder(
    page: Path, reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks of the README made one folder twice; snippets used names that nothing had given."""
    for package in (needed := needs("\n".join(block.text for block in RUN[page]))):
        pytest.importorskip(package, reason=f"{page.name} needs {package}, which is not installed")
    if "transformers" in needed:  # it copies the code of an exported folder
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for block in RUN[page]:
        reader.do(block)


def test_what_a_page_says_wrongly_is_noticed(reader: Reader) -> None:
    reader.do(Block(1, "shell", "et train tiny --minutes 1 --out runs/a  # a comment", None))
    for wrong, why in (
        ("et train tiny --out runs/a", "already exists"),
        ("et train tiny --stepz 3", "did you mean --steps?"),
        ("et train tiny --rule dense --rule.warmup-steps 3", "no such option"),
        ("et train tiny --steps 100 --rule.warmup-steps 900", "longer than the run"),
        ("pip install -e '.[server]'", "server"),
        ("make nothing", "no way to run"),
    ):
        with pytest.raises(AssertionError, match=why):
            reader.do(Block(1, "shell", wrong, None))
