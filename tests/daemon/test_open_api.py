"""An S-node whose API anybody can use says so."""

from __future__ import annotations

import pytest

WARNING = "can use the API, because there is no --api-key-file"


@pytest.mark.parametrize("has_keys", [False, True])
def test_an_api_that_other_machines_reach_without_a_key_is_warned_of(start, tmp_path, has_keys):
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    option = ("--api-key-file", str(keys)) if has_keys else ()
    node = start("--role", "s", "--port", "0", "--host", "0.0.0.0", *option)
    node.wait_for(r"http://[\d.]+:\d+/v1")
    assert (WARNING in node.log.read_text()) != has_keys
    assert node.end() == 0


def test_an_api_for_this_machine_alone_needs_no_key(start):
    node = start("--role", "s", "--port", "0")
    node.api()
    assert WARNING not in node.log.read_text()
    assert node.end() == 0
