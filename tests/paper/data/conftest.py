"""A local server for the tests of downloads."""

import pytest

from support.made_site import Site


@pytest.fixture
def site(monkeypatch):
    # A proxy of the environment would not know the local server.
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = Site()
    yield found
    found.close()
