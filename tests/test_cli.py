"""The command line: what it prints where, how it ends, and that it accepts exactly what the library accepts."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import generate
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


def test_json_is_one_object_on_stdout(folder, capsys):
    assert call(folder, "--prompt", "the cat", "--max-tokens", "5", "--ignore-eos", "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert len(result["token_ids"]) == 5 and result["finish_reason"] == "length"
    assert result["prompt_tokens"] > 0 and result["ttft_s"] > 0 and 0 < result["floor_share"]
    kv = 2 * 2 * 2 * 16 * 4 * (result["prompt_tokens"] + 5)  # K and V x layers x kv_heads x head_dim x float32
    assert result["kv_bytes"] == kv and "KV pool" in err


def test_text_streams_to_stdout_and_figures_to_stderr(folder, capsys):
    assert call(folder, "--prompt", "the cat", "--max-tokens", "5", "--ignore-eos", "--json") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert call(folder, "--prompt", "the cat", "--max-tokens", "5", "--ignore-eos") == 0
    out, err = capsys.readouterr()
    assert out == f"the cat{text}\n" and "TTFT" in err and "of the floor" in err


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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--dtype", "int3"], "dtype"),
        (["--prompts-file", "/no/such/file"], "/no/such/file"),
        (["--prompt", ""], "empty"),
        (["--logit-bias", '{"99999": 1}'], "logit_bias"),
        (["--quant", "int5"], "int5"),
    ],
)
def test_bad_input_is_one_clear_line(folder, capsys, arguments, named):
    assert call(folder, *arguments) == 2
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err and err.strip().splitlines()[-1].startswith("error: ")


def test_unknown_model_says_what_is_known(capsys):
    assert generate.main(["--model", "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


def test_ctrl_c_ends_cleanly(folder):
    command = [sys.executable, str(ROOT / "generate.py"), "--model", folder, *FAST]
    command += ["--prompt", "the cat", "--max-tokens", "400", "--ignore-eos", "--trace"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}  # too small for the whole trace

    def listen():  # tests that run in the background hand down an ear that is shut
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, text=True, env=environment, preexec_fn=listen, **pipes)
    assert process.stdout.read(8)  # it is answering now
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--logit-bias", "{"], "Expecting property name"),
        (["--kv-memory", "much"], "such as 512M or 2G"),
    ],
)
def test_a_flag_that_cannot_be_read_says_why(folder, capsys, arguments, named):
    with pytest.raises(SystemExit) as end:
        call(folder, *arguments)
    assert end.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--prompts-file", ""], "No such file"),
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
def test_no_flag_is_accepted_and_ignored(folder, capsys, arguments, named):
    assert call(folder, *arguments) == 2
    assert named in capsys.readouterr().err


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


def test_a_reader_that_leaves_gets_no_traceback(folder):
    command = [sys.executable, str(ROOT / "generate.py"), "--model", folder]
    program = [*command, *FAST, "--max-tokens", "400", "--ignore-eos"]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    assert child.wait() == 1 and b"Error" not in err and b"error" not in err
    child.stderr.close()
