"""The README's commands run, its table of files is complete, and its reading order is the order of imports."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- [^\n]* -->\n)?```bash\n(.*?)```", README, re.DOTALL)
SETUP = [body.strip() for mark, body in BLOCKS if mark]  # they make an environment: .ci/run and a fresh clone run them
COMMANDS = [line for mark, body in BLOCKS if not mark for line in body.strip().splitlines()]


def run(command: str, cwd: Path) -> subprocess.CompletedProcess:
    words = command.replace("python ", f"{sys.executable} ", 1)
    script = re.sub(r"(\w+)\.py", lambda m: str(ROOT / m[0]) if (ROOT / m[0]).exists() else m[0], words, count=1)
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    return subprocess.run(script, shell=True, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)


# Commands that measure or serve for minutes have tests of their own, named here; all others are run as they stand.
ELSEWHERE = {
    "python bench.py": "test_bench.py",
    "python serve.py": "test_serve.py",
    "python scheduler.py --simulate --requests 1000000": "test_simulate.py",
    "pytest": "the suite itself",
}


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(tuple(ELSEWHERE))])
def test_command_runs(command, tmp_path, smollm2):
    (tmp_path / "prompts.txt").write_text("The sky is\nOne, two,\n", encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() or (tmp_path / "smollm2-int4").exists()


def test_the_main_command_answers_sensibly(tmp_path, smollm2):
    import json

    (main,) = [c for c in COMMANDS if "--json" in c and "capital of France" in c]
    result = json.loads(run(main, tmp_path).stdout)
    assert "Paris" in result["text"] and result["finish_reason"] in ("stop", "length")
    keys = "text token_ids finish_reason prompt_tokens ttft_s tpot_s decode_tok_s prefill_tok_s weight_bytes kv_bytes"
    assert set(keys.split()) | {"load_s", "compile_s", "floor_tok_s", "floor_share"} <= set(result)


def test_setup_commands_name_the_requirements():
    assert len(SETUP) == 2
    assert "requirements.txt" in SETUP[0] and "generate.py --compile --quant int4" in SETUP[0]
    assert "requirements-dev.txt" in SETUP[1] and SETUP[1].endswith("-m pytest")


# -- the house ---------------------------------------------------------------------------------------------------


FOLDERS = ("formats", "native", "drafting", "serving", "benchmarks")
SHIM = "sampling_params"  # one line, for those who imported SamplingParams from it


def reading_order() -> list[str]:
    """The files of the table, each the first link of its row."""
    table = README.split("## Reading order")[1].split("\n### ")[0]
    return re.findall(r"^\| \[(\w+)\.py\]", table, re.MULTILINE)


def modules() -> dict[str, Path]:
    files = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


def imports() -> dict[str, set[str]]:
    """Which of our modules each one imports, lazily and for types included."""
    ours, graph = modules(), {}
    for name, file in ours.items():
        targets = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = targets & ours.keys()
    return graph


def test_every_concept_is_in_the_reading_order():
    assert sorted({path.stem for path in ROOT.glob("*.py")} - {SHIM}) == sorted(reading_order())


def test_imports_run_up_the_reading_order_only():
    order = reading_order()
    for name, targets in imports().items():
        if name in order:
            later = targets & set(order[order.index(name) + 1 :])
            assert not later, f"{name}.py imports {later}, which the README lists later"


def test_imports_never_run_in_a_circle():
    graph, done = imports(), set()
    while ready := [name for name in graph if name not in done and graph[name] <= done]:
        done |= set(ready)
    assert not graph.keys() - done, f"these are in a circle, or import one: {sorted(graph.keys() - done)}"


@pytest.mark.parametrize("name", ["scheduler", "radix"])
def test_scheduling_is_plain_python(name):
    code = f"import sys, {name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
