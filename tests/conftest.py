import fcntl
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
# Before anything imports Triton (torchvision does): without a GPU its kernels run on the CPU, as Python.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tensors here are tiny: more threads only wait for each other (60 s instead of 7 s for a suite on two busy cores), and
# pytest-xdist keeps every core busy already. The environment is for its workers and for processes that tests start.
torch.set_num_threads(1)
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
# No deadline: how long an example takes depends on how busy the machine is, not on whether the code is right. The same
# examples in every run, so that a change is not blamed for what was there; `make reliability` draws new ones.
unharmful = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
patient = {"deadline": None, "suppress_health_check": unharmful}
hypothesis.settings.register_profile("random", **patient)
hypothesis.settings.register_profile("massl", derandomize=True, database=None, **patient)
hypothesis.settings.load_profile("massl")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the `kernel` tests that need a GPU with `gpu`, and skip `gpu` tests where there is none.

    The interpreter is thousands of times slower than a GPU: without one, only the first parameter set of each kernel
    test is run.
    """
    seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("kernel"):
            function = item.nodeid.partition("[")[0]
            if HAS_GPU or function in seen:
                item.add_marker("gpu")
            seen.add(function)
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def docs_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the documentation site: built once, without a warning, for all workers of pytest-xdist."""
    pytest.importorskip("mkdocs")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "docs-site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "built").exists():
            root = Path(__file__).resolve().parents[1]
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
            built = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600, check=False)
            assert built.returncode == 0, built.stdout + built.stderr
            (folder / "built").touch()
    return folder / "site"
