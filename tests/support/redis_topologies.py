"""A Redis Cluster and a Sentinel pair of real servers on this machine, and a server with TLS.

Who calls it: `tests/conformance/test_redis_topologies.py`.
What must stay true: fail-over is the servers' own (a kill, then time-outs of half a second); everything
that is started is killed when the block ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from redis.asyncio import Redis
from redis.crc import key_slot

from pipeline.local.redis import RedisServer
from pipeline.local.server import free_port
from tests.support.servers import new_redis

_WAIT_S = 30.0
_DOWN_AFTER_MS = 500
_SLOTS = 16384
_SYNC_AT_ONCE = ("--repl-diskless-sync-delay", "0")


class SentinelServer(RedisServer):
    """One sentinel that watches `master` as `mymaster`; two have to agree on nothing but the leader."""

    label = "Sentinel"

    def __init__(self, master: RedisServer) -> None:
        super().__init__()
        self._master = master

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        path = self.data_dir / "sentinel.conf"
        path.write_text(
            f"port {self.port}\nbind {self.host}\n"
            f"sentinel monitor mymaster {self._master.host} {self._master.port} 1\n"
            f"sentinel down-after-milliseconds mymaster {_DOWN_AFTER_MS}\n"
            "sentinel failover-timeout mymaster 3000\n"
        )
        return [self._binary, str(path), "--sentinel"], {}


def client_of(server: RedisServer, **more: Any) -> Any:
    return Redis(host=server.host, port=server.port, **more)


@asynccontextmanager
async def started(*servers: RedisServer) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.callback(server.close)
        await asyncio.gather(*(server.start() for server in servers))
        yield


async def until_true(condition: Any) -> None:
    """Until the coroutine function says so."""
    async with asyncio.timeout(_WAIT_S):
        while not await condition():
            await asyncio.sleep(0.05)


# --- sentinels ----------------------------------------------------------------------------------


@dataclass
class SentinelPair:
    master: RedisServer
    replica: RedisServer
    sentinels: tuple[SentinelServer, SentinelServer]

    def url(self, stream: str, query: str = "") -> str:
        hosts = ",".join(one.address for one in self.sentinels)
        return f"redis://{hosts}/0?stream={stream}&sentinel=mymaster{query}"


@asynccontextmanager
async def sentinel_pair() -> AsyncIterator[SentinelPair]:
    """A master, its replica and two sentinels that know each other."""
    master, replica = new_redis(*_SYNC_AT_ONCE), new_redis(*_SYNC_AT_ONCE)
    async with started(master, replica):
        async with client_of(replica) as follower:
            await follower.replicaof(master.host, master.port)

            async def follows() -> bool:
                return bool((await follower.info("replication"))["master_link_status"] == "up")

            await until_true(follows)
        sentinels = SentinelServer(master), SentinelServer(master)
        async with started(*sentinels), client_of(sentinels[0]) as watcher:

            async def complete() -> bool:
                found = await watcher.sentinel_masters()
                facts = found["mymaster"]
                return facts["num-other-sentinels"] == 1 and facts["num-slaves"] == 1

            await until_true(complete)
            yield SentinelPair(master, replica, sentinels)


# --- a cluster ----------------------------------------------------------------------------------


@dataclass
class Cluster:
    """Three masters, and a replica of the one that has the slot of `key`."""

    masters: list[RedisServer]
    replica: RedisServer
    key: str

    def url(self, query: str = "") -> str:
        hosts = ",".join(one.address for one in self.masters)
        return f"redis://{hosts}/0?stream={self.key}&cluster=true{query}"

    def owner(self) -> RedisServer:
        """The master that has `key`, as long as nothing failed over."""
        return self.masters[_third(key_slot(self.key.encode()))]


def _third(slot: int) -> int:
    return min(2, slot * 3 // _SLOTS)


@asynccontextmanager
async def cluster(key: str) -> AsyncIterator[Cluster]:
    arguments = (
        *_SYNC_AT_ONCE,
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        str(_DOWN_AFTER_MS),
    )
    nodes = [new_redis(*arguments, "--cluster-port", str(free_port())) for _ in range(4)]
    async with started(*nodes), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(node)) for node in nodes]
        edges = [next(s for s in range(_SLOTS) if _third(s) == n) for n in range(3)] + [_SLOTS]
        ids = []
        for n, one in enumerate(clients):
            ids.append((await one.execute_command("CLUSTER MYID")).decode())
            await one.execute_command("CLUSTER SET-CONFIG-EPOCH", n + 1)
            if n < 3:
                await one.execute_command("CLUSTER ADDSLOTSRANGE", edges[n], edges[n + 1] - 1)
        bus = int(nodes[0]._arguments[-1])
        for one in clients[1:]:
            await one.execute_command("CLUSTER MEET", nodes[0].host, nodes[0].port, bus)

        async def is_whole() -> bool:
            facts = [await one.execute_command("CLUSTER INFO") for one in clients]
            return all(f["cluster_state"] == "ok" for f in facts) and all(
                f["cluster_known_nodes"] == "4" for f in facts
            )

        await until_true(is_whole)
        found = Cluster(nodes[:3], nodes[3], key)
        owner = ids[nodes.index(found.owner())]
        await clients[3].execute_command("CLUSTER REPLICATE", owner)

        async def follows() -> bool:
            return bool((await clients[3].info("replication")).get("master_link_status") == "up")

        await until_true(follows)
        yield found


# --- TLS ----------------------------------------------------------------------------------------


@dataclass
class TlsServer:
    """Takes only clients with a certificate of its own authority."""

    port: int
    ca_certs: Path
    certfile: Path
    stranger: Path

    @property
    def login(self) -> str:
        return f"&ssl_ca_certs={self.ca_certs}&ssl_certfile={self.certfile}&ssl_keyfile={self.certfile}"


@asynccontextmanager
async def tls_server(folder: Path) -> AsyncIterator[TlsServer]:
    authority, port = trustme.CA(), free_port()
    found = TlsServer(port, folder / "ca.pem", folder / "client.pem", folder / "other.pem")
    authority.cert_pem.write_to_path(str(found.ca_certs))
    trustme.CA().cert_pem.write_to_path(str(found.stranger))
    for name, path in (("localhost", folder / "server.pem"), ("client", found.certfile)):
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(str(path))
    server = new_redis(
        *("--tls-port", str(port), "--tls-ca-cert-file", str(found.ca_certs)),
        *("--tls-cert-file", str(folder / "server.pem")),
        *("--tls-key-file", str(folder / "server.pem")),
    )
    async with started(server):
        yield found
