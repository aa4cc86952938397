"""What all commands of these files share: one way to end, and no flag that is taken and then changes nothing.

Problem. A flag that is accepted and ignored lies: whoever reads the figures believes they were measured with it. To
compare values with their defaults does not find it out: a default, too, may have been asked for.

Idea. Read the words twice, the second time with every place taken already, so that no default can fill it:

    words ─┬─► parser ──► args                             what is used
           └─► parser, all places taken ──► given          only what a word replaced
                                              │
    the command's rules ──► refuse_unused ◄───┘            (flags, do they matter here?, what to do instead) ──► error

A command is a function `main(argv) -> exit code` under the decorator `as_command`, which gives it its other ends:

    what was asked for makes no sense, or is not there    "error: ..." on stderr, 2 (as argparse itself)
    Ctrl-C                                                "interrupted", 130
    whoever read stdout has left (`| head`)               nothing to say, and nobody to say it to: 1

Left out: parsing; that is argparse's. No torch: benchmarks/peers.py imports this under another program's Python.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence


def as_command(main: Callable[..., int]) -> Callable[..., int]:
    """Let `main` end as a command: with its exit code, or with a line that says why not."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush would fail
            return 1
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return 130

    return run


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def value_of(read):
    """A type for argparse that keeps the cause: of a plain ValueError it shows the name of the function only."""

    def convert(text: str):
        try:
            return read(text)
        except (ValueError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return convert


def given(parser: argparse.ArgumentParser, argv: Sequence[str] | None, args: argparse.Namespace) -> set[str]:
    """The names in `args` that the words of the command line set, be it to their defaults."""
    taken: list = []  # a list, because flags that append begin with a copy of what they find
    again, _ = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(vars(args), taken)))
    return {name for name, value in vars(again).items() if value is not taken}


def refuse_unused(given: Iterable[str], *rules: tuple[Iterable[str], object, str]) -> None:
    """Raise ValueError for flags that were given and would change nothing.

    A rule is (names, whether they have an effect, what to do instead).
    """
    for names, effective, instead in rules:
        unused = [flag(name) for name in sorted(set(given) & set(names))]
        if unused and not effective:
            raise ValueError(f"{', '.join(unused)} would change nothing here: {instead}")
