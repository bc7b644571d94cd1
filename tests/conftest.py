"""The tests need no network: the Hub is a server on the loopback interface, set before anything imports a client."""

import os
import shutil
import tempfile

import pytest
from hub_server import HubServer


_hub = HubServer().start()
os.environ.update(
    HF_ENDPOINT=_hub.url,
    HF_TOKEN=_hub.token,
    HF_HOME=tempfile.mkdtemp(prefix="trl-offline-distill-tests-"),
    HF_HUB_DISABLE_XET="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
    # One result on every machine; `make test-gpu` names the device.
    CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    MPLBACKEND="Agg",
)


def pytest_unconfigure():
    _hub.stop()
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def hub() -> HubServer:
    return _hub
