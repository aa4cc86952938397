"""The command line as a format: fields of a dataclass as flags, one way to end, and no flag that changes nothing.

Problem. A flag that is accepted and ignored misleads: whoever reads the figures believes they were measured with it. To
compare values with their defaults does not detect it: a default, too, may have been typed.

Idea. Read the words twice, the second time with every name set already, so that no default can fill it:

    words ─┬─► parser ──► args                             what is used
           └─► parser, all names set ──► given             only what a word replaced
                                              │
    the command's rules ──► refuse_unused ◄───┘            (flags, do they matter here?, what to do instead) ──► error

A command is a function `main(argv) -> exit code` under the decorator `as_command`, which gives it its other ends: 2 for
what makes no sense or does not exist, 130 for Ctrl-C, 1 when the reader of stdout has left (`| head`).

Left out: parsing; that is argparse's. No torch: benchmarks/peers.py imports this under another program's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from formats.fields import SURROGATE


def warn(line: str, end: str = "\n") -> None:
    """Write a line to stderr; where stderr is missing or closed, nothing happens."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:  # print would take None for stdout
            print(line, end=end, file=sys.stderr, flush=True)


def as_command(main: Callable[..., int]) -> Callable[..., int]:
    """Let `main` end as a command: with its exit code, or with a line that says why not."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        for name, flags, mode in (
            ("stdin", os.O_RDONLY, "r"),
            ("stdout", os.O_RDONLY, "w"),
            ("stderr", os.O_RDWR, "w"),
        ):
            if getattr(sys, name) is None:  # closed: the next file would take its number, and C++ would write into it
                setattr(sys, name, open(os.open(os.devnull, flags), mode))  # to stdout, writing fails as it did
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # an answer is not lost where é cannot be written
        try:
            refuse_halves(sys.argv[1:] if argv is None else argv)
            code = main(argv)
            sys.stdout.flush()
            return code
        except (ValueError, OSError) as error:
            return _ended_by(error)
        except KeyboardInterrupt:
            warn("\ninterrupted")
            return 130

    return run


def _ended_by(error: Exception) -> int:
    """Say why a command ends, unless its reader has left; its exit code."""
    try:
        sys.stdout.flush()
    except OSError as lost:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter's last flush would fail, too
        reason = f"stdout cannot be written ({lost.strerror}), and the answer is lost: send it elsewhere"
        error = lost if isinstance(lost, BrokenPipeError) else ValueError(reason)
    if isinstance(error, BrokenPipeError):
        return 1
    warn(f"error: {error}")
    return 2


def refuse_halves(words: Iterable[str]) -> None:
    """Raise ValueError for a word that is no UTF-8, with the flag it belongs to."""
    name = "the command line"
    for word in words:
        name = word.partition("=")[0] if word.startswith("-") else name
        if SURROGATE.search(word):
            raise ValueError(f"{ascii(name)[1:-1]}: {ascii(word)} is no UTF-8: write it in UTF-8")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def value_of(read: Callable):
    """A type for argparse that keeps the cause: of a plain ValueError it shows the name of the function only."""

    def convert(text: str):
        try:
            return read(text)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return convert


READERS = {"integer": int, "real": float, "ids": int, "bias": json.loads, "schema": json.loads, "choice": json.loads}


def add_flags(parser, fields: Iterable[dataclasses.Field], booleans=argparse.BooleanOptionalAction, **defaults) -> None:
    """One flag for each field of a dataclass; `defaults` replace those of the fields.

    Metadata of a field: help; kind, as sampling.SamplingParams lists them (else the annotation says it); read, a
    function from text to value.
    """
    for field in fields:
        annotation = str(field.type).split(" ")[0]
        kind = field.metadata.get("kind") or {"int": "integer", "bool": "switch"}.get(annotation, "text")
        default, text = defaults.get(field.name, field.default), field.metadata["help"].replace("%", "%%")
        if kind == "switch":
            parser.add_argument(flag(field.name), action=booleans, default=default, help=text)
            continue
        read = value_of(field.metadata.get("read") or READERS.get(kind, str))
        text += "" if default is None else f" (default {default})"
        many = {"nargs": "+"} if kind in ("strings", "ids") else {}
        parser.add_argument(flag(field.name), type=read, default=default, help=text, metavar="X", **many)


def given(parser: argparse.ArgumentParser, argv: Sequence[str] | None, args: argparse.Namespace) -> set[str]:
    """The names in `args` that the words of the command line set, be it to their defaults."""
    unset: list = []  # a list, because flags that append begin with a copy of what they find
    again, _ = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), unset)))
    return {name for name, value in vars(again).items() if value is not unset}


def refuse_unused(given: Iterable[str], *rules: tuple[Iterable[str], object, str]) -> None:
    """Raise ValueError for flags that were given and would change nothing.

    A rule is (names, whether they have an effect, what to do instead).
    """
    for names, effective, instead in rules:
        unused = [flag(name) for name in sorted(set(given) & set(names))]
        if unused and not effective:
            raise ValueError(f"{', '.join(unused)} would change nothing here: {instead}")
