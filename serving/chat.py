"""A conversation on the terminal: `generate.py --chat`. Its KV stays in the prefix cache: a turn computes what is new.

A terminal hands over line by line and cuts each at 4,095 characters; arrow keys are characters to it, and pasted lines
are sent one by one. So readline edits the line where there is a keyboard, and knows what was pasted (bracketed paste).
While an answer is written the terminal stays in a mode without lines, where what is typed ahead is not cut either.

    > what is typed or pasted       one message; a blank line is none
    > \"\"\" any number of lines \"\"\"   one message, for those whose terminal cannot paste
    > /new                          forgets the conversation; Ctrl-D ends it, Ctrl-C ends an answer

A full context ends nothing: the oldest turns leave, half of it at once, since what follows them is computed anew.
Left out: a history that outlives the process, and changing what was said.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from formats.command_line import warn
from request import Request
from sampling import SamplingParams
from serving.terminal import stream_answer

HELP = 'Ctrl-D ends the conversation, Ctrl-C an answer, /new begins another; """ before and after: many lines.'
QUOTES = '"""'


def run_chat(llm, system: str | None, params: SamplingParams) -> int:
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    warn(HELP)
    with keyboard():
        while (text := read_message()) is not None:  # "" after Ctrl-C, too
            if text.strip() == "/new":
                messages = list(start)
            if text.strip() in ("", "/new"):
                continue
            messages.append({"role": "user", "content": text})
            try:
                request = ask(llm, messages, params, len(start))
            except ValueError as error:  # this message alone is too long, say: the others stay
                warn(f"error: {error}")
                messages.pop()
                continue
            with contextlib.suppress(KeyboardInterrupt):
                stream_answer(llm, request)
            print()
            messages.append({"role": "assistant", "content": request.answers[0].text})
            warn(f"[{len(request.prompt_ids)} prompt tokens, {request.num_cached_tokens} of them cached]")
    return 0


def ask(llm, messages: list[dict], params: SamplingParams, first: int) -> Request:
    """Queue the next answer. The turns from messages[first] on leave `messages` until it and an answer fit."""
    context = limit = min(llm.max_model_len, llm.scheduler.pool.total * llm.options.block_size)
    kept, room = list(messages), min(params.max_tokens or context, context // 4)
    while True:
        ids, alone = llm.tokenizer.encode_chat(kept), len(kept) == first + 1
        try:
            if alone or len(ids) + room <= limit:
                request = llm.add(ids, params)
                break
        except ValueError:
            if alone:
                raise
        del kept[first : first + 2]
        limit = context // 2
    if left := len(messages) - len(kept):
        warn(f"[the context of {context:,} tokens was full: the oldest {left} messages have left it]")
    messages[:] = kept
    return request


def read_message() -> str | None:
    """A line, or all that stands between two QUOTES; None at the end."""
    try:
        text = read_line("> ")
        if text.lstrip().startswith(QUOTES):
            while not text.rstrip().endswith(QUOTES) or text.strip() == QUOTES:
                text += "\n" + read_line("... ")
            text = text.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    except KeyboardInterrupt:  # what was typed is dropped, the conversation goes on
        print()
        return ""
    except EOFError:
        return None
    return text


def read_line(prompt: str) -> str:
    """A line of stdin; readline is used by input() if stdout, too, is the terminal."""
    if not sys.stdin.isatty() or sys.stdout.isatty():
        return input(prompt)
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(0, 1)
    try:
        return input(prompt)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@contextlib.contextmanager
def keyboard() -> Iterator[None]:
    """Edit lines, if stdin is a terminal, and keep what is typed between them as it is."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    with contextlib.suppress(ImportError):  # some builds of Python lack it
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    before = termios.tcgetattr(0)
    now = termios.tcgetattr(0)
    now[3] &= ~(termios.ICANON | termios.ECHO)  # the local modes
    termios.tcsetattr(0, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
