"""What every test shares: the flat modules on the path, hypothesis profiles."""

import contextlib
import os
import sys
from pathlib import Path

import hypothesis
import pytest

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401  (before any test imports distutils: torch's compiler needs setuptools' own copy)

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Why a test may be skipped. In CI any other skip is a failure: what is not run must not look as if it passed.
EXPECTED_SKIPS = ("needs a GPU", "needs a browser", "runs in the child process", "this is the child process")

# The same draws every time: a change is judged by what it changed. The deep profile goes on searching.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=100, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile("ci")  # --hypothesis-profile=deep overrides it


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file, fetched into the user's cache on first use."""
    import checkpoint

    return checkpoint.fetch("smollm2")


@pytest.fixture
def native():
    """The test starts on the native backend with two threads, and leaves the process as it found it."""
    import kernels

    before, threads = kernels.backend(), kernels.threads()
    kernels.set_threads(2)
    yield kernels.set_backend("native")
    kernels.set_backend(before)
    kernels.set_threads(threads)


def pytest_sessionfinish(session, exitstatus):
    """In CI an unexpected skip fails the run; the reasons stand in pytest's own summary (-ra)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = [r.longrepr[2].removeprefix("Skipped: ") for r in reporter.stats.get("skipped", [])] if reporter else []
    if os.environ.get("CI") and any(not reason.startswith(EXPECTED_SKIPS) for reason in skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
