"""bench.py on a tiny model: the keys that others rely on, and the figures that do not depend on the clock."""

import json

import pytest
import tiny

import bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama", max_position_embeddings=1024))


def result_of(capsys, *arguments: str) -> dict:
    assert bench.main([*arguments, "--json", "--threads", "1", "--num-blocks", "120"]) == 0
    return json.loads(capsys.readouterr().out)


def test_decode_has_the_keys_of_its_peers(folder, capsys):
    sizes = ["--prompt", "20", "--gen", "4", "--batch", "1", "3", "--repeat", "2"]
    result = result_of(capsys, "decode", "--model", folder, "--quant", "int4", "--compile", *sizes)
    assert len(result["prefill_tok_s"]) == 2 and set(result["decode_tok_s"]) == {"1", "3"}
    assert all(rate > 0 for rates in result["decode_tok_s"].values() for rate in rates)
    assert result["load_s"] >= 0 and result["floor_tok_s"] > 0
    assert "decode x3" in bench.decode_text(result)
    del result["decode_tok_s"]["1"]
    assert bench.decode_text(result).endswith("reached by one sequence  -")


def test_start_waits_for_a_token_and_says_when_none_came(folder, capsys):
    result = result_of(capsys, "start", "--model", folder, "--kernels", "reference", "--repeat", "1")
    ((first,), (end,), (torch_alone,)) = (result[key] for key in ("first_token_s", "end_s", "import_torch_s"))
    assert 0 < torch_alone and 0 < first <= end
    assert bench.main(["start", "--model", folder + "/nothing", "--repeat", "1"]) == 2
    assert "no token came" in capsys.readouterr().err


def test_perplexity_rows(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log", encoding="utf-8")
    result = result_of(capsys, "perplexity", "--model", folder, "--quant", "int8", "--text", str(text))
    assert list(result) == ["dense", "int8, float activations", "int8, int8 activations"]
    dense = result["dense"]["perplexity"]
    assert all(abs(row["perplexity"] / dense - 1) < 0.05 for row in result.values())
    assert "+0.00%" in bench.quality.quality_table(result)


def test_8_bit_activations_cost_less_than_one_percent(smollm2, capsys):
    result = result_of(capsys, "perplexity", "--quant", "int4")
    dense, floats, rounded = (row["perplexity"] for row in result.values())
    assert abs(floats / dense - 1) < 1e-3 and abs(rounded / floats - 1) < 0.01


def test_profile_accounts_for_the_step(folder, capsys):
    flags = ["--model", folder, "--quant", "int4", "--compile", "--batch", "2", "--gen", "6"]
    result = result_of(capsys, "profile", *flags)
    assert "kernel: linear" in bench.quality.profile_table(result)
    parts = result["2"]["step"]
    whole = parts.pop("whole step")
    assert abs(sum(parts.values()) - whole) < 1e-6 and {"schedule", "model", "sample"} <= set(parts)
    assert {"attention", "linear", "rope", "embedding"} <= set(result["2"]["kernels"])


def test_the_simulator_is_a_command(capsys):
    assert bench.main(["simulate", "--requests", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 20


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--gen", "2000", "--batch", "1"], "context of 2018, not 1024"),
        (["--gen", "40", "--batch", "2", "--num-blocks", "7"], "needs 8 blocks, and the pool has 7"),
        (["--batch", "3", "--max-num-seqs", "2"], "--batch 3 sequences in one step do not fit in --max-num-seqs 2"),
        (["--batch", "3", "--max-num-batched-tokens", "2"], "do not fit in --max-num-batched-tokens 2"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--threads", "0"], "threads=0"),
    ],
)
@pytest.mark.parametrize("command", ["decode", "profile"])
def test_what_would_measure_another_workload_is_refused_and_not_enlarged(folder, capsys, command, flags, said):
    small = ["--model", folder, "--threads", "1", "--kernels", "reference", "--json", "--gen", "4", *flags]
    assert bench.main([command, *small]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out


def test_a_budget_that_is_given_is_the_one_measured():
    words = ["decode", "--prompt", "600", "--batch", "3"]
    assert bench.parse_arguments(words).max_num_batched_tokens == 600
    assert bench.parse_arguments([*words, "--max-num-batched-tokens", "512"]).max_num_batched_tokens == 512


SCORED_ALONE = ["--compile", "--no-compile", "--prefix-cache=radix", "--activations=int8", "--seed=0", "--policy=fcfs"]


@pytest.mark.parametrize(
    ("command", "given", "named"),
    [
        *(("perplexity", flag, flag.replace("no-", "").partition("=")[0]) for flag in SCORED_ALONE),
        *((command, "--seed=1", "--seed") for command in ("decode", "profile", "start")),
        ("decode", "--num-speculative-tokens=5", "--num-speculative-tokens"),
        ("start", "--trace", "--trace"),
        ("claims", "--fresh", "--fresh"),
    ],
)
def test_flags_that_a_command_cannot_use_are_refused(command, given, named, capsys):
    assert bench.main([command, "--model", "never loaded", given]) == 2
    assert f"error: {named} would change nothing here: " in capsys.readouterr().err


def test_only_what_was_given_is_passed_on():
    words = "start --quant int4 --no-chunked --compile --kv-memory 2G --threads 2 --repeat 1"
    passed_on = bench.parse_arguments(words.split()).forwarded
    assert passed_on == ["--quant", "int4", "--compile", "--kv-memory", str(2 << 30), "--no-chunked"]


@pytest.mark.parametrize(("content", "cause"), [(b"", "0 tokens"), (b"a", "1 tokens"), (b"\xff\xfe", "not UTF-8")])
def test_a_text_without_perplexity_is_refused(folder, tmp_path, capsys, content, cause):
    (tmp_path / "text.txt").write_bytes(content)
    flags = ["--model", folder, "--kernels", "reference", "--num-blocks", "9", "--text", str(tmp_path / "text.txt")]
    assert bench.main(["perplexity", *flags]) == 2
    said = capsys.readouterr().err
    assert cause in said and "text.txt" in said


def test_an_interruption_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.OTHERS, "size", (interrupted, ""))
    assert bench.main(["size"]) == 130 and "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", (["--prompt", "0"], ["--batch", "0"], ["--gen", "-1"]))
def test_bad_sizes_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.main(["decode", *arguments])
    assert f"{arguments[0]}: '{arguments[1]}': must be at least 1" in capsys.readouterr().err
