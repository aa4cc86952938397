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


def reading_order() -> list[str]:
    table = README.split("## Reading order")[1].split("\n## ")[0]
    return re.findall(r"\(((?:\w+/)?\w+\.(?:py|cpp|h))\)", table)


def test_every_file_is_in_the_reading_order():
    tracked = subprocess.run(["git", "ls-files", "*.py", "*.cpp", "*.h"], cwd=ROOT, capture_output=True, text=True)
    ours = {f for f in tracked.stdout.split() if not re.match(r"tests/|examples/|\w+/__init__", f)}
    assert ours == set(reading_order()) and len(reading_order()) == len(ours)


def test_imports_run_up_the_list_only():
    """A file imports only what stands in its row or above; what a function imports may come later (it says why)."""
    order = [name.removesuffix(".py") for name in reading_order() if name.endswith(".py")]
    row = {}
    for i, line in enumerate(README.split("## Reading order")[1].split("\n## ")[0].splitlines()):
        row |= {name.replace("/", "."): i for name in re.findall(r"\(((?:\w+/)?\w+)\.py\)", line)}
    for name in (name.replace("/", ".") for name in order):
        tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for node in tree.body:
            targets = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                targets += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            for target in targets:
                assert row.get(target, -1) <= row[name], f"{name}.py imports {target}.py, which the README lists later"
