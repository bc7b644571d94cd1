"""The tests need no network: the Hub is a server on the loopback interface, set before anything imports a client."""

import importlib.util
import os
import tempfile

import pytest


if importlib.util.find_spec("hub_server"):
    from hub_server import HubServer

    _hub = HubServer().start()
    os.environ.update(HF_ENDPOINT=_hub.url, HF_TOKEN=_hub.token)
else:
    os.environ.update(HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")

os.environ.update(
    HF_HOME=tempfile.mkdtemp(prefix="trl-offline-distill-tests-"),
    HF_HUB_DISABLE_XET="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    MPLBACKEND="Agg",
    WANDB_DISABLED="true",
)


@pytest.fixture(scope="session")
def hub():
    return _hub
