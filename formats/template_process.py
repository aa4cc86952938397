"""A chat template runs in a process of its own, whose time and memory the operating system bounds.

The problem. A template is a stranger's program: it may loop for ever, or build 10^10 characters in one operation. A
thread cannot be stopped in the middle of an operation, and would hold the interpreter's lock; a process can.

The idea. One child renders for everybody. A template that takes too much ends the child; the next one gets another.
Inside, Jinja's immutable sandbox, set up as transformers does, keeps templates away from the child's own objects:

    run ══ {"source", "variables", "seconds"} ══► main ──► Jinja     CPU time: a timer whose signal kills
        ◄══ {"text"} or {"error"} ══════════════                     memory: a limit on the address space

Left out: parallel renderings (one takes well under a millisecond).
"""

import functools
import json
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # CPU time of one rendering
MEMORY = 2**30  # bytes of address space
LONGEST = 2**20  # characters of a prompt, and 16 for each of the input


class TemplateError(ValueError):
    """The conversation could not be rendered; the message says why, in the template's own words where it has some."""


class TemplateProcess:
    """The child, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def run(self, source: str, variables: dict[str, Any]) -> str:
        """The text that the template makes of `variables`, which JSON must be able to write. Raises TemplateError."""
        try:
            request = json.dumps({"source": source, "variables": variables, "seconds": SECONDS})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the conversation is not JSON: {error}") from None
        line = ""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            self._process = None  # unless it answers: after Ctrl-C the late answer must not be taken for the next one's
            with suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line.endswith("\n"):
                limits = f"{SECONDS} s of CPU time or {MEMORY >> 20} MiB of memory"
                raise TemplateError(f"the chat template took more than {limits}; it was stopped")
            self._process = process
        answer = json.loads(line)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    @staticmethod
    def _start() -> subprocess.Popen:
        command = [sys.executable, "-m", "formats.template_process"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        pipes |= {"encoding": "ascii", "start_new_session": True}  # Ctrl-C is not meant for it
        return subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent, **pipes)


# ---- in the child


class Arguments(dict):
    """Of a tool call: an object to most templates, JSON text to those that append it to a text of theirs."""

    def __add__(self, text: str) -> str:
        return _tojson(self) + text

    def __radd__(self, text: str) -> str:
        return text + _tojson(self)


def _with_arguments(value: dict) -> dict:
    if isinstance(value.get("arguments"), dict):
        value["arguments"] = Arguments(value["arguments"])
    return value


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; for inference the tag means its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Plain JSON. Jinja's own filter escapes <, > and & for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(str(message))


def main() -> None:
    """Answer each line of stdin."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    compiled = functools.lru_cache(16)(sandbox.from_string)
    for line in sys.stdin:
        try:
            request = json.loads(line, object_hook=_with_arguments)
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            text = compiled(request["source"]).render(request["variables"])
            if len(text) > LONGEST + 16 * len(line):
                raise TemplateError(f"the chat template made {len(text):,} characters of {len(line):,}: too many")
            answer = {"text": text}
        except MemoryError:
            raise  # and so end
        except TemplateError as error:
            answer = {"error": str(error)[:1000]}
        except Exception as error:  # a stranger's program may raise anything
            answer = {"error": f"the chat template failed: {type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
