"""How commands end, and which flags a command line gave."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from formats.command_line import as_command, given, refuse_unused

ROOT = Path(__file__).resolve().parent.parent


def ending(error: BaseException):
    @as_command
    def main(argv):
        raise error

    return main(None)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("n=0: at least 1"), 2, "error: n=0: at least 1\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_an_ending_is_a_line_and_a_code(error, code, said, capsys):
    assert ending(error) == code
    assert capsys.readouterr() == ("", said)


def test_what_is_a_bug_keeps_its_traceback():
    with pytest.raises(TypeError):
        ending(TypeError())


def test_the_code_is_what_main_returns():
    assert as_command(lambda argv: len(argv))(["a", "b"]) == 2


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, str(ROOT / "scheduler.py"), "--simulate", "--requests", "5000", "--trace"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(1)
    child.stdout.close()
    said = child.stderr.read()
    assert child.wait() == 1 and said == b""
    child.stderr.close()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--peer", action="append")
    parser.add_argument("--names", nargs="+", default=["a"])
    parser.add_argument("--chunked", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(command="serve")
    return parser


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], set()),
        (["--turns", "4"], {"turns"}),  # its default, and yet it was asked for
        (["--turn=9", "--other", "x"], {"turns"}),
        (["--peer", "a", "--peer", "b", "--names", "a"], {"peer", "names"}),
        (["--chunked", "--json"], {"chunked", "json"}),
        (["--no-chunked"], {"chunked"}),
    ],
)
def test_given_is_what_the_words_set(words, names):
    args, _ = parser().parse_known_args(words)
    assert given(parser(), words, args) == names


def test_flags_without_effect_are_refused_by_name():
    refuse_unused({"turns"}, (["turns", "shared"], True, "-"), (["rate"], False, "-"), ([], False, "-"))
    with pytest.raises(ValueError, match="^--max-turns, --shared would change nothing here: leave them out$"):
        refuse_unused({"shared", "max_turns", "rate"}, (["shared", "max_turns"], None, "leave them out"))
