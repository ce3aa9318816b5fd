"""A router that speaks TLS with S-nodes and with clients: real processes, and certificates of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl

import aiohttp
import pytest
from aiohttp import web
from engines.routed import SECRET, scripted
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from wire.certificates import Authority

from fastdecode.daemon.tls import server_tls
from fastdecode.router.main import main

N_TOKENS = 900
#: A sequence that is recomputed gets the same tokens in fp32.
EXACT = ("--s-threads", "1", "--dtype", "fp32", "--kv-dtype", "fp32")


async def health(_):
    return web.json_response({"status": "ok", "running": 0, "waiting": 0})


async def s_nodes_of(url):
    """What a router says of its S-nodes, once it has asked them: why each gets no request, by URL."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        while True:
            async with http.get(f"{url}/health") as answer:
                found = {s_node["url"]: s_node["why_not"] for s_node in (await answer.json())["s_nodes"]}
            if found and "it has not been asked yet" not in found.values():
                return found
            await asyncio.sleep(0.05)


async def test_only_the_certificate_of_an_s_node_s_own_address_is_accepted(start, tmp_path):
    """Stand-ins for S-nodes show a good certificate, one of another authority, one of another host, and none."""
    authority = Authority(tmp_path, "authority")
    signed = [
        authority.sign("good", "IP:127.0.0.1", "DNS:localhost"),
        Authority(tmp_path, "stranger").sign("strange", "IP:127.0.0.1"),
        authority.sign("elsewhere", "IP:192.0.2.1"),
    ]
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for tls in (*(server_tls(*files) for files in signed), None):
            urls.append(await stack.enter_async_context(scripted(web.get("/health", health), tls=tls)))
        urls[3] = urls[3].replace("http:", "https:")
        options = ("--port", "0", "--s-node-ca", str(authority.file))
        router = start(*options, *(word for url in urls for word in ("--s-node", url)), program="router")
        url = (await asyncio.to_thread(router.wait_for, r"(http://127\.0\.0\.1:\d+)/v1"))[1]
        why_not = await s_nodes_of(url)
        assert why_not[urls[0]] == ""
        refused = (
            "does not answer: its certificate is refused ({}); --s-node-ca names the certificates that may sign it"
        )
        assert why_not[urls[1]] == refused.format("unable to get local issuer certificate")
        assert why_not[urls[2]] == refused.format("IP address mismatch, certificate is not valid for '127.0.0.1'")
        assert why_not[urls[3]] == "does not answer: it does not speak TLS as its https URL says"
        for bad in urls[1:]:
            await asyncio.to_thread(router.wait_for, re.escape(f"S-node {bad}: {why_not[bad]}"))
        # The certificate of S-nodes that are found by a name has to be that of the name.
        port = urls[0].rpartition(":")[2]
        named = start(*options, "--s-nodes-dns", f"https://localhost:{port}", program="router")
        url = (await asyncio.to_thread(named.wait_for, r"(http://127\.0\.0\.1:\d+)/v1"))[1]
        assert (await s_nodes_of(url))[urls[0]] == ""
        port = urls[2].rpartition(":")[2]
        named = start(*options, "--s-nodes-dns", f"https://localhost:{port}", program="router")
        url = (await asyncio.to_thread(named.wait_for, r"(http://127\.0\.0\.1:\d+)/v1"))[1]
        assert "certificate is not valid for 'localhost'" in (await s_nodes_of(url))[urls[2]]


async def test_a_stream_over_tls_outlives_its_s_node(start, tmp_path):
    """From the client to the router and on to two S-nodes, of which one is killed."""
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.sign("node", "IP:127.0.0.1")
    (tmp_path / "secret").write_bytes(SECRET)
    tls = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--secret-file", str(tmp_path / "secret"))
    r_node = start("--role", "r", "--listen", "tcp://127.0.0.1:0", "--kv-memory", "64MiB", "--threads", "1", *tls[4:])
    at = r_node.wait_for(r"(tcp://127\.0\.0\.1:\d+)")[1]
    s_nodes = [start("--port", "0", "--r-node", at, *EXACT, *tls, own_group=True) for _ in range(2)]
    urls = [s_node.wait_for(r"(https://127\.0\.0\.1:\d+)/v1")[1] for s_node in s_nodes]
    named = [word for url in urls for word in ("--s-node", url)]
    router = start("--port", "0", *named, "--s-node-ca", str(authority.file), *tls, program="router")
    router.wait_for(r"takes requests(?s:.)*takes requests")
    url = router.wait_for(r"(https://127\.0\.0\.1:\d+/v1)")[1]
    http = DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=authority.file))
    ask = {"model": "fastdecode-demo", "prompt": "It was", "max_tokens": N_TOKENS, "temperature": 0}
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120, http_client=http) as api:
        calm = (await api.completions.create(**ask, extra_body={"ignore_eos": True})).choices[0].text
        stream = await api.completions.create(**ask, stream=True, extra_body={"ignore_eos": True})
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            if len(texts) == 1:
                answer = await http.get(url.replace("/v1", "/health"))
                [busy] = [i for i, s_node in enumerate(answer.json()["s_nodes"]) if s_node["requests"]]
                s_nodes[busy].kill_group()
        assert "".join(texts) == calm


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--s-node-ca {none}", "--s-node-ca {none}: No such file or directory"),
        ("--s-node-ca {text}", "--s-node-ca {text}: not certificates in PEM"),
        ("--ssl-certfile {text}", "not a certificate chain and its private key, both in PEM"),
        ("--ssl-keyfile {text}", "--ssl-keyfile needs --ssl-certfile"),
        ("--s-node http://a:65536", "--s-node: 'http://a:65536' is not of the form http://host:port"),
        (
            "--s-nodes-dns http://a",
            "--s-nodes-dns: 'http://a' is not of the form http://host:port or https://host:port",
        ),
        ("--port 65536", "--port: 65536 is not a TCP port (0 to 65535; 0: any free one)"),
        ("--drain-seconds -1", "--drain-seconds: -1 is not a time in seconds"),
        ("--s-nodes-dns http://a:1", "give one of --s-node, --s-nodes-file and --s-nodes-dns"),
    ],
)
def test_a_bad_file_ends_the_router_with_a_sentence(words, why, tmp_path, capsys):
    (tmp_path / "text").write_text("hello\n")
    files = {"none": tmp_path / "none", "text": tmp_path / "text"}
    with pytest.raises(SystemExit):
        main(["--s-node", "https://127.0.0.1:1", *words.format(**files).split()])
    assert why.format(**files) in capsys.readouterr().err
