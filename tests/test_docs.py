"""The documentation keeps up with the package.

``docs/troubleshooting.md``, or ``docs/troubleshooting_tools.md`` for what training does not meet,
has an entry for every message that a user can meet. Messages are collected from the source: what
is raised, warned of, noted as a fallback or said by the command line, with ``…`` in the place of
what varies. Links between pages lead somewhere, and names of the package that pages mention
exist. What pages show runs: the quickstart, both sides of each diff, the script that draws the
picture.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
import runpy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fsdp_fx
from fsdp_fx import FSDPContext, inspection
from fsdp_fx.occupancy import outline_of
from ranks import RankPools, run_script

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fsdp_fx"
TROUBLESHOOTING = [
    ROOT / "docs" / name for name in ("troubleshooting.md", "troubleshooting_tools.md")
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Calls whose texts a user gets to see, besides what is raised.
SAYS = {"warning", "warn", "graph_break", "add_note", "Fallback", "fail", "error", "_disagree"}
SAYS |= {"_conclude", "__init__"}  # verdicts on other ranks; exceptions that write their own text

# Texts that need no entry of their own, by file, with the reason.
EXEMPT = {
    "passes/verify.py": "the rules that a program breaks: a defect in the package, whose entry is "
    "that of ProgramError, not of each rule",
}

# A text of fewer words says nothing to search for. One that is put into another is a part of it,
# and needs an entry of its own only if it is a sentence.
FEWEST_WORDS = 2
FEWEST_WORDS_INSIDE = 5

# So many words of a message, or all, make an entry that stands for no other.
ENOUGH_WORDS = 6


@dataclass(frozen=True)
class Message:
    """A text that a user can meet.

    Args:
        where: file and line.
        text: the text on one line, ``…`` for what varies.
        needs_entry: whether it is long enough to be looked for.
    """

    where: str
    text: str
    needs_entry: bool


@dataclass
class Source:
    """A module of the package.

    Args:
        path: the file.
        tree: its syntax.
    """

    path: Path
    tree: ast.Module
    functions: dict[str, list[ast.FunctionDef]] = field(default_factory=dict)
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Call):
                self.calls.setdefault(_called(node), []).append(node)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def messages(self) -> Iterator[Message]:
        """What is said here, each text once."""
        seen: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                arguments = node.exc.args
            elif isinstance(node, ast.Call) and _called(node) in SAYS:
                arguments = node.args
            else:
                continue
            for argument in arguments:
                texts = list(self._texts(argument, set()))
                first = texts[0] if texts else ""
                for text in texts:
                    direct = isinstance(argument, ast.Constant | ast.JoinedStr) and text == first
                    fewest = FEWEST_WORDS if direct else FEWEST_WORDS_INSIDE
                    if text not in seen:
                        seen.add(text)
                        where = f"{self.path.relative_to(ROOT)}:{node.lineno}"
                        yield Message(where, text, len(_words(text)) >= fewest)

    def _texts(self, node: ast.AST, visited: set[ast.AST]) -> Iterator[str]:
        """The texts that an expression may evaluate to, and those put into them."""
        if node in visited:
            return
        visited.add(node)
        match node:
            case ast.Constant(value=str(text)):
                yield _one_line(text)
            case ast.JoinedStr(values=values):
                yield _rendered(values)
                for value in values:
                    if isinstance(value, ast.FormattedValue):
                        yield from self._texts(value.value, visited)
            case ast.Name(id=name):
                yield from self._assigned(node, name, visited)
            case ast.Call(func=function, args=arguments):
                name = _called(node)
                for source in [self] if name in self.functions else _sources():
                    for definition in source.functions.get(name, ()):
                        for inner in ast.walk(definition):
                            if isinstance(inner, ast.Return) and inner.value is not None:
                                yield from source._texts(inner.value, visited)
                if isinstance(function, ast.Attribute):  # "...".join(), error.splitlines()
                    yield from self._texts(function.value, visited)
                for argument in arguments:
                    yield from self._texts(argument, visited)
            case ast.IfExp(body=body, orelse=other):
                yield from self._texts(body, visited)
                yield from self._texts(other, visited)
            case ast.BoolOp(values=values) | ast.Tuple(elts=values) | ast.List(elts=values):
                for value in values:
                    yield from self._texts(value, visited)
            case ast.BinOp(left=left, right=right):
                yield from self._texts(left, visited)
                yield from self._texts(right, visited)
            case ast.Dict(values=values):
                for value in values:
                    yield from self._texts(value, visited)
            case ast.Subscript(value=value):
                yield from self._texts(value, visited)

    def _assigned(self, node: ast.AST, name: str, visited: set[ast.AST]) -> Iterator[str]:
        """What a name stands for: assigned in its function or its module, or an argument."""
        scope: ast.AST | None = node
        while scope is not None and not isinstance(scope, ast.FunctionDef | ast.Module):
            scope = self.parents.get(scope)
        while scope is not None:
            if isinstance(scope, ast.FunctionDef):
                parameters = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
                if any(parameter.arg == name for parameter in parameters):
                    yield from self._given(scope, name, visited)
            if isinstance(scope, ast.FunctionDef | ast.Module):
                body = ast.walk(scope) if isinstance(scope, ast.FunctionDef) else scope.body
                for inner in body:
                    if isinstance(inner, ast.Assign):
                        targets = inner.targets
                    elif isinstance(inner, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                        targets = [inner.target]
                    else:
                        continue
                    names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                    if name in names and inner.value is not None:
                        yield from self._texts(inner.value, visited)
            scope = self.parents.get(scope)

    def _given(self, function: ast.FunctionDef, name: str, visited: set[ast.AST]) -> Iterator[str]:
        """What a function of this module is given for a parameter, by callers in the module."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        names = [parameter.arg for parameter in parameters if parameter.arg != "self"]
        for call in self.calls.get(function.name, ()):
            if name in names and names.index(name) < len(call.args):
                yield from self._texts(call.args[names.index(name)], visited)
            for keyword in call.keywords:
                if keyword.arg == name:
                    yield from self._texts(keyword.value, visited)


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _rendered(values: list[ast.expr]) -> str:
    parts = [str(value.value) if isinstance(value, ast.Constant) else "…" for value in values]
    return _one_line("".join(parts))


def _one_line(text: str) -> str:
    # %s and %d are what a logger fills in.
    return " ".join(re.sub(r"%[sdr]", "…", text).split())


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]{2,}", text)


@functools.cache
def _sources() -> tuple[Source, ...]:
    return tuple(
        Source(path, ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    )


@functools.cache
def messages() -> tuple[Message, ...]:
    return tuple(message for source in _sources() for message in source.messages())


@dataclass(frozen=True)
class Entry:
    """An entry of a page: a message as it is written there.

    Args:
        text: the text, with ``…`` for what varies or is left out.
    """

    text: str

    def covers(self, message: Message) -> bool:
        """Whether it is of the message: it reads the same, and has enough of its words."""
        pattern = ".*".join(re.escape(part) for part in self.text.split("…"))
        enough = min(ENOUGH_WORDS, len(_words(message.text)))
        return re.fullmatch(pattern, message.text) is not None and len(_words(self.text)) >= enough


@functools.cache
def entries() -> tuple[Entry, ...]:
    """The entries of the pages: lines that are bold code and nothing else."""
    page = "\n".join(path.read_text(encoding="utf-8") for path in TROUBLESHOOTING)
    found = re.findall(r"^\*\*`(.+)`\*\*$", page, re.MULTILINE)
    twice = [text for text, times in Counter(found).items() if times > 1]
    assert not twice, f"docs/troubleshooting*.md have these entries twice: {twice}"
    return tuple(map(Entry, found))


def test_every_message_has_an_entry_in_troubleshooting() -> None:
    missing = [
        message
        for message in messages()
        if message.needs_entry
        and not any(message.where.startswith(f"fsdp_fx/{file}:") for file in EXEMPT)
        and not any(entry.covers(message) for entry in entries())
    ]
    assert not missing, (
        "docs/troubleshooting*.md lack entries. Under the heading that fits add these lines, and "
        "below what it means and what to do (… stands for anything, the end may be left out for "
        f"it after {ENOUGH_WORDS} words):\n\n"
        + "\n\n".join(f"**`{message.text}`**\n    from {message.where}" for message in missing)
    )


def test_every_entry_in_troubleshooting_is_of_a_message() -> None:
    stale = [entry.text for entry in entries() if not any(map(entry.covers, messages()))]
    assert not stale, (
        "docs/troubleshooting*.md have entries of messages that fsdp_fx does not have (any more). "
        "Remove them, or write them as the source does:\n\n" + "\n".join(stale)
    )


def test_the_messages_are_found() -> None:
    """One of each kind: what reads the source has not gone blind."""
    texts = {message.text for message in messages()}
    assert {
        "adopt() takes modules, not …: adopt(*chunks)",  # raised
        "the backward of … is missing",  # assigned to a name, and put into what is raised
        "they have other units or options: …",  # returned by a method of another module
        "left its program and was recorded as a new one",  # noted as a fallback
        "a compiled backward is one graph",  # in a table of the module
        "is …, not a list",  # said through a function of the package
        "argument --…: expected one argument",  # of the command line
    } <= texts
    assert any("is saved for backward since" in text for text in texts)  # logged
    assert any(text.endswith("or return a clone") for text in texts)  # warned of
    assert any("run outside of graphs" in text for text in texts)  # the reason of a graph break


# Links and names


def _anchors(page: Path) -> set[str]:
    """What a link into the page may point at, as GitHub names headings."""
    anchors = set()
    for title in re.findall(r"^#+ (.+)$", _without_blocks(page), re.MULTILINE):
        kept = re.sub(r"[^\w\- ]", "", title.strip().lower())
        anchors.add(kept.replace(" ", "-"))
    return anchors


def _without_blocks(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_blocks(page)):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.relative_to(ROOT)}: {target} leads nowhere"
        if anchor:
            assert anchor in _anchors(path), f"{page.relative_to(ROOT)}: no heading for {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    names = r"\b((?:fsdp_fx|tests|examples|docs)/[\w/]+\.(?:py|md|svg))\b"
    for name in re.findall(names, page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}"


@functools.cache
def _objects() -> dict[str, object]:
    """What the names that pages use for objects stand for."""
    return {"ctx": FSDPContext(mode="recorded"), "context": FSDPContext, "fsdp_fx": fsdp_fx}


def _has(root: str, attributes: list[str]) -> bool:
    owner = _objects()[root]
    path = root
    for attribute in attributes:
        path += f".{attribute}"
        if isinstance(owner, ModuleType) and not hasattr(owner, attribute):
            try:
                owner = importlib.import_module(path)
            except ImportError:
                return False
            continue
        if isinstance(getattr(type(owner), attribute, None), property):
            return True  # of a context that has run nothing: what it leads to is not known
        if not hasattr(owner, attribute):
            return False
        owner = getattr(owner, attribute)
    return True


_LOGGERS = {f"fsdp_fx.{topic}" for topic in get_args(inspection.Topic)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_that_pages_use_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for root, rest in re.findall(r"\b(ctx|context|fsdp_fx)\.(?!py\b)((?:\w+\.)*\w+)", text):
        name = f"{root}.{rest}"
        if name not in _LOGGERS:
            assert _has(root, rest.split(".")), f"{page.relative_to(ROOT)} uses {name}"


# What the pages show, run


def _blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for name, block in blocks if name == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_pages_is_python(page: Path) -> None:
    for block in _blocks(str(page.relative_to(ROOT)), "python"):
        compile(block, str(page), "exec")


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_quickstart_runs_as_printed(tmp_path: Path, compiled: bool) -> None:
    (quickstart,) = _blocks("README.md", "python")
    if compiled:
        # Inductor would only take longer.
        quickstart, lines = re.subn(
            r'(?m)^# Compiled: (chunks = .*backend="fsdp_fx")\)',
            r'\1, options={"region_compiler": "eager"})',
            quickstart,
        )
        assert lines == 1
    path = tmp_path / "quickstart.py"
    path.write_text(quickstart, encoding="utf-8")
    printed = run_script(path, cwd=tmp_path)
    assert "step 2: loss" in printed
    assert re.search(r"windows: 3 closed\W+1 recorded\b.*\b2 replayed", printed)
    how = "compiled, graph" if compiled else "eager, scheduled from hooks"
    for chunk in ("c0", "c1"):
        assert f"chunk {chunk}: {how}" in printed
    assert "fallbacks: none" in printed
    (listing,) = (b for b in _blocks("docs/reading_a_program.md", "") if b.startswith("# program:"))
    for part in listing.split("...\n"):
        assert part.rstrip() in printed, "the program that docs/reading_a_program.md explains"
    if not compiled:
        (explained,) = (b for b in _blocks("README.md", "") if b.startswith("recorded mode"))
        for line in explained.splitlines():
            assert line in printed, "what explain() says in the README"


def _prepare(accumulates: bool) -> dict[str, Any]:
    """What a loop on a page starts with: everything but what the page shows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    models = [_Model() for _ in range(2)]
    torch.manual_seed(1 + dist.get_rank())
    batches: list[Any] = [
        [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(4)] for _ in range(3)
    ]
    return {
        "F": F,
        "nn": nn,
        "torch": torch,
        "fully_shard": fully_shard,
        "mesh": mesh,
        "policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "model": models[0],
        "chunks": models,
        "batches": batches if accumulates else [batch[0] for batch in batches],
        "run_schedule": _run_schedule,
        "without_gradient_sync": _without_gradient_sync,
    }


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.adapters = nn.Sequential(nn.Linear(16, 2), nn.Linear(2, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.adapters(x)
        return result


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        result: torch.Tensor = self.head(x)
        return result.float()


@contextlib.contextmanager
def _without_gradient_sync(chunk: Any) -> Iterator[None]:
    for flag in (False, True):
        chunk.set_requires_gradient_sync(flag)
        chunk.set_is_last_backward(flag)
        if not flag:
            yield


def _run_schedule(
    chunks: Sequence[Any], batch: Sequence[Any], no_sync: Any = lambda _: contextlib.nullcontext()
) -> None:
    """1F1B over two chunks, with two microbatches under way."""
    saved: dict[tuple[int, int], list[torch.Tensor]] = {}

    def forward(microbatch: int) -> None:
        x, target = batch[microbatch]
        for index, chunk in enumerate(chunks):
            x = x.detach().requires_grad_(index > 0)
            saved[index, microbatch] = [x]
            x = chunk(x)
            saved[index, microbatch].append(x)
        saved[index, microbatch][1] = F.mse_loss(x, target) / len(batch)

    def backward(microbatch: int) -> None:
        last = microbatch == len(batch) - 1
        gradient = None
        for index in reversed(range(len(chunks))):
            x, y = saved[index, microbatch]
            with contextlib.nullcontext() if last else no_sync(chunks[index]):
                y.backward(gradient)
            gradient = x.grad

    forward(0)
    for microbatch in range(1, len(batch)):
        forward(microbatch)
        backward(microbatch - 1)
    backward(len(batch) - 1)


# Of each page with a diff: whether its batches have microbatches, and whether the base is frozen.
LOOPS = {
    "README.md": (True, False),
    "docs/how_to/plain_training.md": (False, False),
    "docs/how_to/grad_accumulation.md": (True, False),
    "docs/how_to/hand_written_schedules.md": (True, False),
    "docs/how_to/lora.md": (False, True),
}


def _diff(page: str) -> list[str]:
    (diff,) = _blocks(page, "diff")
    return diff.splitlines()


def test_every_diff_has_at_most_three_changed_lines() -> None:
    pages = [str(page.relative_to(ROOT)) for page in PAGES]
    assert {page for page in pages if _blocks(page, "diff")} >= {*LOOPS}
    for page in pages:
        for block in _blocks(page, "diff"):
            lines = [line[1:].strip() for line in block.splitlines() if line[0] in "+-"]
            free = [line for line in lines if re.match(r"import |from |ctx = fsdp_fx\.", line)]
            # A line that is replaced is one.
            replaced = len(re.findall(r"^-.*\n\+", block, re.MULTILINE))
            assert len(lines) - len(free) - replaced <= 3, page


def _trained(page: str, side: str) -> list[torch.Tensor]:
    """The weights that one side of a page's diff ends with."""
    accumulates, frozen = LOOPS[page]
    names = _prepare(accumulates)
    for chunk in names["chunks"]:
        for layer in chunk.layers:
            layer.base.requires_grad_(not frozen)
    before = [p.detach().clone() for p in names["model"].parameters()]
    source = "\n".join(line[1:] for line in _diff(page) if line[0] in (" ", side))
    exec(compile(source, page, "exec"), names)
    ctx = names.get("ctx")
    assert (ctx is not None) == (side == "+"), page
    if ctx is not None:
        assert ctx.stats.windows == 3, page
        assert ctx.stats.recorded_windows == (ctx.mode == "recorded"), page
        assert not ctx.fallbacks, page
    after = [p.full_tensor() for p in names["model"].parameters()]
    assert not all(map(torch.equal, before, after)), page
    others = [p for chunk in names["chunks"][1:] for p in chunk.parameters()]
    return after + [p.full_tensor() for p in others if isinstance(p, DTensor)]


def _every_page() -> dict[str, bool]:
    return {page: all(map(torch.equal, _trained(page, "-"), _trained(page, "+"))) for page in LOOPS}


def test_both_sides_of_every_diff_train_to_the_same_weights(ranks: RankPools) -> None:
    for results in ranks(2).run(_every_page):
        assert results == dict.fromkeys(LOOPS, True)


# The picture of docs/concepts.md


def test_the_picture_is_what_the_script_draws(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "docs" / "draw_step.py"))
    script["main"](tmp_path / "step.svg")
    drawn, kept = (
        re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text(encoding="utf-8"))
        for file in (tmp_path / "step.svg", ROOT / "docs" / "step.svg")
    )
    assert "gather in flight" in kept
    # Where the ticks of the axes are is matplotlib's business.
    assert [text for text in drawn if not text.isdigit()] == [
        text for text in kept if not text.isdigit()
    ]
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    gathers = [len(outline_of(script["program"](budget)).gathers) for budget in (8 * 2**20, None)]
    assert f"{gathers[1]} gathers instead of {gathers[0]}" in page
