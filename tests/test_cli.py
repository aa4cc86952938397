"""The command line: what it prints where, how it ends, which flags were given, and that it takes what LLM takes."""

import argparse
import ast
import contextlib
import dataclasses
import io
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.request
from pathlib import Path

import pytest
import tiny

import generate
from formats.command_line import as_command, given, refuse_unused
from generate import EngineConfig
from sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
FAST = ["--kernels", "reference", "--num-blocks", "40", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama"))


def call(folder: str, *arguments: str) -> int:
    return generate.main(["--model", folder, *FAST, *arguments])


def test_every_argument_of_the_library_is_a_flag():
    args = vars(generate.parse_arguments([]))
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= set(args)
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name != "quiet"}
    assert {name: args[name] for name in defaults} == defaults


def test_stdout_holds_the_text_or_one_json_object_and_stderr_the_rest(folder, capsys):
    asked = ["--prompt", "the cat", "--max-tokens", "5", "--ignore-eos"]
    assert call(folder, *asked, "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert len(result["token_ids"]) == 5 and result["finish_reason"] == "length"
    assert result["prompt_tokens"] > 0 and result["ttft_s"] > 0 and 0 < result["floor_share"]
    kv = 2 * 2 * 2 * 16 * 4 * (result["prompt_tokens"] + 5)  # K and V x layers x kv_heads x head_dim x float32
    assert result["kv_bytes"] == kv and "KV pool" in err
    assert call(folder, *asked) == 0
    out, err = capsys.readouterr()
    assert out == f"the cat{result['text']}\n" and "TTFT" in err and "of the floor" in err


def test_prompts_file_answers_in_order(folder, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\n\nhello world\n", encoding="utf-8")
    assert call(folder, "--prompts-file", str(file), "--max-tokens", "3", "--ignore-eos", "--json") == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [a["prompt"] for a in answers] == ["the cat", "hello world"]
    assert all(len(a["outputs"][0]["token_ids"]) == 3 for a in answers)


def test_chat_keeps_its_prefix(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello there, how are you today?\nand now?\n"))
    assert call(folder, "--chat", "--max-tokens", "8", "--block-size", "4") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "of them cached" in line]
    assert len(lines) == 2 and "0 of them cached" in lines[0] and "0 of them cached" not in lines[1]


def test_a_full_context_lets_the_oldest_turns_leave_and_a_new_conversation_begin(folder, monkeypatch, capsys):
    small = ["--max-tokens", "8", "--ignore-eos", "--max-model-len", "100", "--system", "be the cat"]
    for blocks, block_size in ((40, 16), (20, 4)):  # bounded by the model's context, and by the pool
        lines = [*(f"the cat {i}" for i in range(9)), "the " * 100, "and now", "", "/new", "the dog"]
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        sizes = ["--num-blocks", str(blocks), "--block-size", str(block_size)]
        assert call(folder, "--chat", *small, *sizes) == 0
        err = capsys.readouterr().err.splitlines()
        lengths = [int(line[1:].split()[0]) for line in err if "of them cached" in line]
        assert len(lengths) == 11 and any("messages have left it" in line for line in err)
        assert sum(line.startswith("error: prompt of") for line in err) == 1  # alone, and the others stayed
        assert lengths[9] > lengths[0] and lengths[10] <= lengths[0] < max(lengths) <= min(100, blocks * block_size)


TYPED = {
    "the cat\n": "the cat",
    "a cat\x1b[D\x1b[D\x1b[DX\x7fthe \n": "a the cat",  # arrows and backspace
    "\n": None,
    "\x1b[200~def f():\r\r    1\x1b[201~\r": "def f():\n\n    1",
    "x" * 6000 + "\n": "x" * 6000,
    '"""a\n\n  b\n"""\n': "a\n\n  b",
    '""" one """\n': " one ",
    "/new\n": None,
    "é 😀\n": "é 😀",
}


@pytest.mark.parametrize(
    "term, out, ahead", [("xterm", "terminal", False), ("dumb", "terminal", True), ("xterm", "file", False)]
)
def test_what_is_typed_or_pasted_arrives_as_it_is(tmp_path, term, out, ahead):
    code = f"""import sys, time; sys.path.insert(0, {str(ROOT)!r})
from serving import chat
def ask(llm, messages, params, first):
    time.sleep({0.3 * ahead})
    with open("got", "a") as got: got.write(repr(messages[-1]["content"]) + "\\n")
    raise ValueError("next")
chat.ask = ask
sys.exit(chat.run_chat(None, None, None))"""
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    file = open(tmp_path / "out", "w") if out == "file" else terminal
    streams = {"stdin": terminal, "stdout": file, "stderr": terminal}
    environment = os.environ | {"TERM": term, "LC_ALL": "C.UTF-8"}
    child = subprocess.Popen([sys.executable, "-c", code], **streams, cwd=tmp_path, env=environment)
    shown = b""

    def wait_for(prompt: bytes) -> None:
        nonlocal shown
        while prompt not in shown:
            assert select.select([keyboard], [], [], 60)[0], shown[-200:]
            shown += os.read(keyboard, 1 << 16)
        shown = shown.partition(prompt)[2]

    for i, keys in enumerate(TYPED):
        if i == 0 or not ahead:  # or it is typed while an answer is written
            wait_for(b"> ")
        for line in keys.encode().splitlines(keepends=True):
            for at in range(0, len(line), 500):
                os.write(keyboard, line[at : at + 500])
                while select.select([keyboard], [], [], 0.05)[0]:  # the echo, or neither side could go on
                    shown += os.read(keyboard, 1 << 16)
    os.write(keyboard, b"\x04")
    assert child.wait(30) == 0 and termios.tcgetattr(terminal) == before
    got = [ast.literal_eval(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert got == [text for text in TYPED.values() if text is not None]
    assert out == "terminal" or (tmp_path / "out").read_text() == ""
    os.close(keyboard), os.close(terminal)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--temperature", "-1"], "temperature"),
        (["--prompts-file", "/no/such/file"], "/no/such/file"),
        (["--prompts-file", ""], "No such file"),
        (["--prompt", ""], "empty"),
        (["--logit-bias", '{"99999": 1}'], "logit_bias"),
        (["--quant", "int5"], "int5"),
        (["--speculate", ""], "speculate=''"),
        (["--kv-memory", "1M"], "both size the pool"),  # FAST gives num_blocks
        (["--device", "mps"], "device='mps'"),
        (["--device", "meta"], "device='meta'"),
        (["--num-blocks", str(10**15)], "lower --num-blocks"),
        (["--num-speculative-tokens", "5"], "--num-speculative-tokens would change nothing here"),
        (["--verify", "rejection", "--speculate", "ngram"], "--verify would change nothing here"),
        (["--logprobs", "2", "--prompt-logprobs", "0"], "--logprobs, --prompt-logprobs would change nothing here"),
        (["--chat", "--n", "2"], "--n would change nothing here"),
    ],
)
def test_bad_or_unused_input_is_one_clear_line(folder, capsys, arguments, named):
    assert call(folder, *arguments) == 2
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err and err.strip().splitlines()[-1].startswith("error: ")


def answering(folder: str, *flags: str, **options) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "generate.py"), "--model", folder, *FAST, "--max-tokens", "400"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, "--ignore-eos", *flags], text=True, **pipes, **options)


def test_ctrl_c_ends_cleanly(folder):
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}

    def listen():  # tests that run in the background hand down a signal that is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # Pipes that are too small for the whole trace keep it from ending by itself.
    process = answering(folder, "--trace", env=environment, preexec_fn=listen, pipesize=4096)
    assert process.stdout.read(8)  # it is answering now
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments, named",
    [(["--logit-bias", "{"], "Expecting property name"), (["--kv-memory", "much"], "such as 512M or 2G")],
)
def test_a_flag_that_cannot_be_read_says_why(folder, capsys, arguments, named):
    with pytest.raises(SystemExit) as end:
        call(folder, *arguments)
    assert end.value.code == 2 and named in capsys.readouterr().err


def test_a_prompts_file_of_another_encoding_is_named(folder, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_bytes("the caf\xe9\n".encode("latin-1"))
    assert call(folder, "--prompts-file", str(file)) == 2
    err = capsys.readouterr().err
    assert str(file) in err and "UTF-8" in err and "KV pool" not in err  # before anything is loaded
    file.write_bytes(b"\xef\xbb\xbfthe cat\n")
    assert call(folder, "--prompts-file", str(file), "--max-tokens", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["prompt"] == "the cat"


def test_json_holds_the_logprobs_that_were_asked_for(folder, tmp_path, capsys):
    asked = ["--logprobs", "2", "--prompt-logprobs", "1", "--max-tokens", "3", "--ignore-eos", "--json"]
    assert call(folder, "--prompt", "the cat", *asked) == 0
    alone = json.loads(capsys.readouterr().out)
    scores = alone["outputs"][0]["logprobs"]
    assert [score["token"] for score in scores] == alone["token_ids"] and len(scores[0]["top"]) == 2
    assert alone["prompt_logprobs"][0] is None and alone["prompt_logprobs"][1]["logprob"] < 0
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\n")
    assert call(folder, "--prompts-file", str(file), *asked) == 0
    (listed,) = json.loads(capsys.readouterr().out)["answers"]
    assert listed["outputs"] == alone["outputs"] and listed["prompt_logprobs"] == alone["prompt_logprobs"]


def test_best_of_shows_the_best_and_not_the_first(folder, capsys):
    drawn = ["--prompt", "the cat", "--temperature", "1", "--max-tokens", "4", "--ignore-eos"]
    for seed in "123":  # the first is the best of four by chance now and then
        assert call(folder, *drawn, "--seed", seed, "--n", "4", "--best-of", "4", "--logprobs", "0", "--json") == 0
        answers = json.loads(capsys.readouterr().out)["outputs"]
        best = max(answers, key=lambda answer: answer["cumulative_logprob"])
        assert call(folder, *drawn, "--seed", seed, "--best-of", "4", "--json") == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == best["token_ids"]
        assert call(folder, *drawn, "--seed", seed, "--best-of", "4") == 0
        assert capsys.readouterr().out == f"the cat{best['text']}\n"


CLOSED, LEFT, FULL = "2>&-", "2> >(true)", "2>/dev/full"


@pytest.mark.parametrize(
    "stderr, flags",
    [(CLOSED, "--json"), (CLOSED, "--chat"), (LEFT, "--trace --prompts-file prompts"), (FULL, "--quant int5")],
)
def test_a_missing_or_closed_stderr_ends_nothing(folder, tmp_path, stderr, flags):
    (tmp_path / "prompts").write_text("the cat\n")
    command = f"{sys.executable} {ROOT}/generate.py --model {folder} {' '.join(FAST)} --max-tokens 3 {flags} {stderr}"
    pipe, bash = subprocess.PIPE, shutil.which("bash")
    done = subprocess.run(command, shell=True, executable=bash, cwd=tmp_path, stdout=pipe, input=b"the cat\n")
    assert done.returncode == (2 if "int5" in flags else 0) and bool(done.stdout) == ("int5" not in flags)
    assert "--json" not in flags or len(json.loads(done.stdout)["token_ids"]) <= 3


@pytest.mark.parametrize("stdout", [">&-", ">/dev/full"])
@pytest.mark.parametrize("command", ["generate.py --prompt a --json", "scheduler.py --simulate --requests 5 --json"])
def test_an_answer_that_stdout_cannot_take_is_an_error(folder, stdout, command):
    flags = f"--model {folder} {' '.join(FAST)} --max-tokens 3" if "generate" in command else ""
    words = f"{sys.executable} {ROOT}/{command} {flags} {stdout}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(words, shell=True, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "error: stdout cannot be written" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize("flag", ["--prompt", "--stop", "--model", "--prompts-file"])
def test_words_that_are_no_utf8_are_refused_in_a_sentence(folder, flag, capsys):
    half = os.fsdecode(b"caf\xe9")
    assert call(folder, flag, half) == 2
    assert f"error: {flag}: 'caf\\udce9' is no UTF-8" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("stderr", [CLOSED, LEFT])
def test_a_server_without_stderr_serves(folder, stderr):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"exec {sys.executable} {ROOT}/serve.py --model {folder} {' '.join(FAST)} --port {port} {stderr}"
    server = subprocess.Popen(words, shell=True, executable=shutil.which("bash"))
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                assert answer.status == 200
                break
            assert server.poll() is None, "it ended at start"
            time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()


def test_what_stdout_cannot_encode_is_written_in_escapes(folder, tmp_path):
    (tmp_path / "prompts").write_text("the café\n", encoding="utf-8")
    for flags in (["--prompt", "the café"], ["--prompts-file", str(tmp_path / "prompts")]):
        for more in ([], ["--json"]):
            command = [sys.executable, str(ROOT / "generate.py"), "--model", folder, *FAST, "--max-tokens", "3"]
            environment = os.environ | {"PYTHONIOENCODING": "ascii"}
            done = subprocess.run([*command, *flags, *more], capture_output=True, text=True, env=environment)
            assert done.returncode == 0, done.stderr
            if more:
                result = json.loads(done.stdout)  # escapes as JSON knows them
                assert len(flags[1]) < 10 or result["answers"][0]["prompt"] == "the café"
            else:
                assert done.stdout.startswith("the caf\\xe9")


def test_a_reader_that_leaves_gets_no_traceback(folder):
    child = answering(folder)
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    assert child.wait() == 1 and "Error" not in err and "error" not in err
    child.stderr.close()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("n=0: at least 1"), 2, "error: n=0: at least 1\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
        (TypeError(), None, ""),  # a bug keeps its traceback
    ],
)
def test_a_command_ends_with_a_line_and_a_code(error, code, said, capsys):
    @as_command
    def main(argv):
        raise error

    if code is None:
        pytest.raises(TypeError, main)
    else:
        assert main() == code
    assert capsys.readouterr() == ("", said)
    assert as_command(len)(["a", "b"]) == 2


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
