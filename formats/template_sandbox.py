"""A Jinja environment in which a stranger's template can run.

The problem. A chat template is a program that came with a model. It must find the environment it was written for, and
it must find nothing else: no way to Python, no way to hold the engine for an hour, no way to fill the memory.

The idea. Jinja's immutable sandbox closes the first way. A meter closes the others: each rendering gets a number of
units and pays one for every character that is about to be built and a few for every step of a loop, *before* it
happens; and every now and then this thread's CPU time is looked at.

    {% for i in range(100000) %}         <- `tick` at the top of every loop body and macro: put there by rewriting the
      {% set s = s ~ s %}                <- parsed template; `~` and slices become calls that pay, too
      {{ s * 1000 }}                     <- operators the sandbox intercepts pay for their result
      {{ s | replace("a", s) }}          <- filters and methods pay for what they take and what they add
    {% endfor %}                         <- every buffer that Jinja joins (output, macro, captured block) pays

Counting values instead of asking the operating system keeps the limit the same on every machine, and it lets the one
request fail that asked for it. The environment itself is what chat templates expect (transformers' documentation,
"Chat templates"): blocks trimmed, loop controls, `tojson` that escapes nothing, `strftime_now`, `raise_exception`, and
a `{% generation %}` that is tolerated.

Left out: filters that no chat template needs (center, wordwrap, urlize ...): the fewer there are, the fewer must be
metered. The meter bounds what a template builds, not what Python uses meanwhile: a few hundred MB are possible, so a
process that runs models of unknown origin still belongs under a memory limit of the system.
"""

import functools
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Environment, filters, nodes, pass_environment
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

RENDER_UNITS = 16_000_000  # characters built, plus STEP_UNITS per loop step or macro call
UNITS_PER_CHARACTER = 64  # more of them for each character of the input
RENDER_SECONDS = 5.0  # CPU time of the rendering thread
STEP_UNITS = 32
UNITS_BETWEEN_LOOKS = 1024
FILTERS = """abs attr capitalize count d default dictsort e escape first float forceescape groupby int items last
length list lower map max min reject rejectattr reverse safe select selectattr sort string title trim truncate unique
upper wordcount""".split()


class TemplateError(ValueError):
    """The conversation could not be rendered; the message says why, in the template's own words where it has some."""


class _Meter:
    """What one rendering may still spend."""

    def __init__(self, units: int):
        self.units = units
        self.next_look = units  # at the clock: looking costs more than most loop steps
        self.deadline = time.thread_time() + RENDER_SECONDS

    def charge(self, units: int) -> None:
        self.units -= units
        if self.units < 0:
            raise TemplateError("the chat template builds too much text or loops too long; it was stopped")
        if self.units > self.next_look:
            return
        self.next_look = self.units - UNITS_BETWEEN_LOOKS
        if time.thread_time() > self.deadline:
            raise TemplateError(f"the chat template ran for {RENDER_SECONDS} s of CPU time; it was stopped")

    def size(self, value: Any) -> int:
        """Characters in `value` (and 8 an item), charged while counting: a list that holds another a million times
        over, itself made so, ends here."""
        if isinstance(value, Mapping):
            return sum(self.size(key) + self.size(item) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return sum(map(self.size, value))
        units = 8 + (len(value) if isinstance(value, (str, range)) else 0)
        self.charge(units)
        return units


_METER: ContextVar[_Meter] = ContextVar("meter of the rendering in progress")


@contextmanager
def metered(given: Any) -> Iterator[None]:
    """Compile and render inside this block. `given` is the template's input: long conversations may cost more.

    Everything that goes wrong inside comes out as a TemplateError.
    """
    meter = _Meter(RENDER_UNITS)
    token = _METER.set(meter)
    try:
        meter.units += UNITS_PER_CHARACTER * meter.size(given)
        meter.next_look = meter.units
        yield
    except TemplateError:
        raise
    except Exception as error:  # a stranger's program may raise anything
        raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
    finally:
        _METER.reset(token)


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _charge_operator(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`: a large result is refused before it is built."""
    meter = _METER.get()
    if operator == "%" and isinstance(left, str):
        if re.search(r"\d{5}|\*", left):
            raise SecurityError("a format with a width of five digits or more")
        meter.charge(left.count("%") * meter.size(right))
    elif operator == "*":
        repeated, times = (left, right) if hasattr(left, "__len__") else (right, left)
        if hasattr(repeated, "__len__"):
            meter.charge(len(repeated) * max(times, 0) if isinstance(times, int) else 0)
        else:
            meter.charge(_bits(left) + _bits(right))
    elif operator == "**":
        meter.charge(_bits(left) * (abs(right) if isinstance(right, int) else 1))
    else:
        meter.charge(meter.size(left) + meter.size(right))


def _charge_method(text: str, name: str, args: tuple) -> None:
    """Before a method of a string: those that return more than they were given, by what they will return."""
    meter = _METER.get()
    meter.size(text)
    meter.size(args)
    if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        meter.charge(args[0])
    elif name == "expandtabs":
        meter.charge(len(text) * (args[0] if args and isinstance(args[0], int) else 8))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str):
        meter.charge(text.count(args[0]) * len(args[1]))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        meter.charge(len(text) * len(args[0]))
    elif name in ("format", "format_map"):
        if re.search(r"\d{5}|\{[^{}]*\{", text):
            raise SecurityError("a format with a width of five digits or more, or with a computed one")
        meter.charge(text.count("{") * meter.size(args))


def _metered(function: Any) -> Any:
    """A filter that first pays for what it is given."""

    @functools.wraps(function)  # keeps Jinja's own marks, e.g. "pass the environment as the first argument"
    def run(*args: Any, **kwargs: Any) -> Any:
        _METER.get().size((*args, kwargs))
        return function(*args, **kwargs)

    return run


@pass_environment
def _join(environment: Environment, values: Iterable, d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = map(filters.make_attrgetter(environment, attribute), values)
    parts = [str(value) for value in values]
    _charge_method(str(d), "join", (parts,))
    return str(d).join(parts)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    _charge_method(str(text), "replace", (old, new))
    return str(text).replace(old, new, count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    padding = width if isinstance(width, str) else _METER.get().charge(width) or " " * width
    _charge_method(text, "replace", ("\n", "\n" + padding))
    return filters.do_indent(text, padding, first, blank)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON. Jinja's own filter escapes <, > and & for HTML, which no model was trained on."""
    _METER.get().charge((indent if isinstance(indent, int) else 0) * (1 + _METER.get().size(value)))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; for inference the tag means its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Instrument(NodeTransformer):
    """Adds the meter to a parsed template where the sandbox offers no hook: loops, macros, `~` and slices."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node = self.visit_Macro(node)
        if node.test is not None:  # `for x in xs if test`: steps whose test fails never reach the body
            node.test = nodes.And(_call("tick"), node.test)
        return node

    def visit_Macro(self, node):
        node = self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick"), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        return _call("tilde", *self.generic_visit(node).nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        node = self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
            return _call("cut", node.node, *bounds)
        return node


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. Templates reach `tick`, `tilde` and `cut` only as rewritten
    by `_Instrument`; no name leads there."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        # optimized=False: constant expressions would be computed while compiling.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=extensions)
        self.finalize = self._printed
        self.filters = {name: _metered(self.filters[name]) for name in FILTERS}
        self.filters |= {"join": _join, "replace": _replace, "indent": _indent, "tojson": _tojson}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    def _parse(self, source, name, filename):
        return _Instrument().visit(super()._parse(source, name, filename))

    def tick(self) -> bool:
        _METER.get().charge(STEP_UNITS)
        return True

    def tilde(self, *values: Any) -> str:
        _METER.get().size(values)
        return "".join(map(str, values))

    def cut(self, value: Any, *bounds: Any) -> Any:
        _METER.get().charge(len(value))
        return value[slice(*bounds)]

    def _printed(self, value: Any) -> Any:
        _METER.get().size(value)
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """How Jinja joins every buffer: the output, macros, captured blocks."""
        pieces = []
        for part in parts:
            _METER.get().charge(len(part))
            pieces.append(part)
        return "".join(pieces)

    def call_binop(self, context, operator, left, right):
        _charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902 (Jinja's own signature)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            _charge_method(owner, __obj.__name__, args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value):
        formatter = super().wrap_str_format(value)
        if formatter is None:
            return None

        def run(*args, **kwargs):
            _charge_method(value.__self__, "format", (args, kwargs))
            return formatter(*args, **kwargs)

        return run
