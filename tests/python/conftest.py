"""Tests of the Python package, on the host device: python -m pytest tests/python. FA_LIBRARY names libfa.so where it is
neither in the package nor in build/release. --device cuda runs what takes a device on a GPU, --full all models."""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "python"))
for name in ("FA_LIBRARY", "FA_PARALLEL_LIBRARY"):  # some tests start processes elsewhere
    if os.environ.get(name):
        os.environ[name] = os.path.abspath(os.environ[name])
collect_ignore = ["ctypes_test.py"]  # a script of its own


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", choices=["cpu", "cuda"])
    parser.addoption("--full", action="store_true", help="also what takes long: tests marked `full`")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: takes long, and runs with --full alone")


@pytest.fixture(scope="session")
def device(request):
    name = request.config.getoption("--device")
    torch = pytest.importorskip("torch")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return name


def refused(kinds, call, *words):
    """That `call` raises one of `kinds` with these words in it."""
    with pytest.raises(kinds) as caught:
        call()
    assert all(word in str(caught.value) for word in words), f"{words} are named: {caught.value}"


def pytest_collection_modifyitems(config, items):
    """On a GPU only what takes a device is asked for."""
    if config.getoption("--device") != "cpu":
        for item in items:
            if "device" not in item.fixturenames:
                item.add_marker(pytest.mark.skip(reason="of the host device"))
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="of --full"))
