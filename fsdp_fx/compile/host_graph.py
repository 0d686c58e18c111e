"""The host code of one slice, as a graph that prints with units, bytes and calls.

:mod:`fsdp_fx.compile.lowering` writes the graph, :mod:`fsdp_fx.compile.execution` notes
which calls run it and with which units. The graph itself names no units, so that
identical chunks share it; what it prints names those of the calls that it served.

``code`` is, as in any ``fx.GraphModule``, what runs; ``print_readable`` is what a person reads:
one line per gather, free, reduction and region, then the operators of each region. Nothing
here changes what runs.
"""

from __future__ import annotations

import operator
import re
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..planning.memory import format_bytes
from ..trace import UnitSpec
from .regions import CompiledRegion, SplitGraph

__all__ = ["Binding", "HostGraph", "pack", "region_texts"]

_WIDTH = 100
_COMMENT_COLUMN = 44
_SHOWN = 8  # calls, and names of one unit input


@dataclass(frozen=True)
class Binding:
    """A call that ran a host graph.

    Attributes:
        call: the call, in words.
        units: the unit behind each of the graph's unit inputs.
    """

    call: str
    units: tuple[UnitSpec, ...]


def pack(*values: Any) -> list[Any]:
    """The arguments of a region, in the list that it clears."""
    return list(values)


class HostGraph(fx.GraphModule):
    """A graph of regions and of what the program puts between them.

    Its function takes one list, which it clears: a :class:`~fsdp_fx.residency.Residency`, the
    units, and the inputs of the captured graph.

    Args:
        graph: the graph: its inputs are the residency, ``units`` units, and the captured
            graph's.
        units: how many units.
        title: what it is, for display: ``"graph 0 backward"``.
        split: the captured graph that it runs the regions of. Held weakly: it knows shapes,
            and with them what outlives compilation.
        runs: the code of each region.

    Attributes:
        bindings: the calls that it has served, by their words.
    """

    def __init__(
        self,
        graph: fx.Graph,
        units: int,
        title: str,
        split: SplitGraph,
        runs: Sequence[CompiledRegion],
    ) -> None:
        super().__init__({}, graph, class_name=re.sub(r"\W+", "_", title.title().replace(" ", "")))
        self.title = title
        self.bindings: dict[str, Binding] = {}
        placeholders = [node.name for node in graph.find_nodes(op="placeholder")]
        self._units = {name: index for index, name in enumerate(placeholders[1 : 1 + units])}
        self._split = weakref.ref(split)
        self._region_names = tuple(run.__name__ for run in runs)

    def note_call(self, call: str, units: Sequence[UnitSpec]) -> None:
        """Remember that ``call`` runs this graph with ``units``."""
        self.bindings[call] = Binding(call, tuple(units))

    def print_readable(  # type: ignore[override]
        self, print_output: bool = True, *, regions: bool = True, **unused: Any
    ) -> str:
        """The graph as Python code, with units, bytes and the calls that use it.

        Args:
            print_output: whether to print it as well.
            regions: whether the operators of the regions follow.
            **unused: what ``fx.GraphModule.print_readable`` takes besides, of which nothing
                applies here.

        Returns:
            The text.

        Raises:
            TypeError: another argument is given.
        """
        if unused:
            raise TypeError(
                f"print_readable() of a host graph takes print_output and regions, not "
                f"{', '.join(unused)}"
            )
        parts = ["\n".join(self._lines())]
        if regions:
            split = self._split()
            if split is None:
                parts.append("# its compiled code is gone, and the text of its regions with it")
            else:
                parts.extend(region_texts(split, self._region_names))
        text = "\n\n".join(parts) + "\n"
        if print_output:
            print(text)
        return text

    def __str__(self) -> str:
        return self.print_readable(print_output=False, regions=False)

    # The text

    def _lines(self) -> Iterator[str]:
        yield f"# {self.title}"
        bindings = list(self.bindings.values())
        for binding in bindings[:_SHOWN]:
            yield f"# runs for {binding.call}"
        if len(bindings) > _SHOWN:
            yield f"# and for {len(bindings) - _SHOWN} more calls"
        for name, index in self._units.items():
            yield f"#   {name}: {self._name(index)}, {self._size(index)}"
        placeholders = [node.name for node in self.graph.find_nodes(op="placeholder")]
        name = re.sub(r"\W+", "_", self.title)
        yield from _wrapped(f"def {name}({', '.join(placeholders)}):", indent="")
        for node in self.graph.nodes:
            if node.op == "call_method":
                yield self._method(node)
            elif node.op == "output":
                yield from _wrapped(f"return\0{_text(node.args[0])}")
            elif node.op == "call_function" and node.target not in (pack, operator.getitem):
                yield from self._region(node)

    def _region(self, node: fx.Node) -> Iterator[str]:
        arguments = node.args[0]
        yield from _wrapped(f"{_results(node)}{node.target.__name__}({_text(arguments)})")  # type: ignore[union-attr]

    def _method(self, node: fx.Node) -> str:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        results, arguments = _results(node), ", ".join(map(_text, node.args[1:]))
        code = f"    {results}{target.name}.{node.target}({arguments})"
        meanings: dict[Any, Callable[[str, str, str], str]] = {
            "acquire": lambda unit, size, _: f"{unit}, {size}: gather if absent, wait",
            "prefetch": lambda unit, size, _: f"{unit}, {size}: gather ahead",
            "release": lambda unit, *_: f"{unit}: read for the last time here",
            "free": lambda unit, size, _: f"{unit}, {size}: free",
            "reduce": lambda unit, _, size: f"{unit}, {size} of gradients: reduce",
            "keep_gradients": lambda unit, _, size: f"{unit}, {size} of gradients: keep full",
            "accumulators": lambda unit, *_: f"{unit}: gradients that products are added to",
            "transient_gradients": lambda unit, *_: f"{unit}: gradients that products write",
            "scratch_gradients": lambda unit, *_: f"{unit}: gradients that nobody asks for",
            "add_gradients": lambda unit, *_: f"{unit}: gradients are there",
        }
        meaning = meanings.get(node.target)
        unit = target if target.name in self._units else node.args[1]
        if meaning is None or not isinstance(unit, fx.Node):
            return code
        index = self._units[unit.name]
        comment = meaning(self._name(index), self._size(index), self._size(index, gradient=True))
        if len(code) > _WIDTH - 30 and results:
            return "\n".join((f"    # {comment}", *_wrapped(code.strip())))
        if len(code) > _WIDTH - 30:
            head, _, rest = code.partition("(")
            return "\n".join((f"{head}(  # {comment}", *_wrapped(rest, indent="        ")))
        return f"{code:<{_COMMENT_COLUMN}}  # {comment}"

    def _specs(self, index: int) -> list[UnitSpec]:
        specs = [binding.units[index] for binding in self.bindings.values()]
        return list({spec.name: spec for spec in specs}.values())

    def _name(self, index: int) -> str:
        names = [spec.name for spec in self._specs(index)]
        if not names:
            return "not bound yet"
        more = f" | {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return " | ".join(names[:_SHOWN]) + more

    def _size(self, index: int, gradient: bool = False) -> str:
        sizes = [spec.gradient_bytes if gradient else spec.bytes for spec in self._specs(index)]
        return " | ".join(map(format_bytes, dict.fromkeys(sizes)))


def region_texts(split: SplitGraph, names: Sequence[str]) -> Iterator[str]:
    """The operators of each distinct region of a captured graph, as code.

    Args:
        split: the captured graph.
        names: of each of its regions; equal regions have equal names.
    """
    for name in dict.fromkeys(names):
        places = [index for index, other in enumerate(names) if other == name]
        region = split.regions[places[0]]
        text = region.graph_module.print_readable(print_output=False).strip()
        head = f"# {name}: region {', '.join(map(str, places))} of {len(names)}"
        yield f"{head}\n{text.replace('class Region(', f'class {name}(', 1)}"


def _results(call: fx.Node) -> str:
    """What the results of a call are called, in their order; nothing where nobody takes any."""
    names = [user.name for user in call.users]
    return f"({', '.join(names)}{',' if len(names) == 1 else ''}) = " if names else ""


def _text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return _text(list(argument.args)) if argument.target is pack else argument.name
    if isinstance(argument, list):
        return f"[{', '.join(map(_text, argument))}]"
    if isinstance(argument, tuple):
        return f"({', '.join(map(_text, argument))}{',' if len(argument) == 1 else ''})"
    return repr(argument)


def _wrapped(code: str, indent: str = "    ") -> list[str]:
    # Python goes on to the next line inside of brackets only, not around a "=".
    lines = textwrap.wrap(
        code.replace(" = ", "\0=\0"),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]
