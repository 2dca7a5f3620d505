"""One scripted server for the tests that leave it as they found it."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.running import LocalServer, local_server


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """K = 2, four slots, contexts of 128 tokens."""
    flags = (
        "--num-speculative-tokens 2 --max-num-seqs 4 --max-model-len 128 --num-pages 64 --max-body-mib 0.1"
    )
    with local_server(*flags.split()) as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as made:
        yield made
