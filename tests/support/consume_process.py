"""A consuming process that tests SIGKILL: `python consume_process.py URL SETTLE`.

Who calls it: the crash tests. It prints `READY`, then one line `GOT <body> <attempt>` per record.
SETTLE is `none`, or `all-but:<body>`: everything else is settled and flushed at once.
"""

from __future__ import annotations

import asyncio
import sys

from actors.ports import Deadline, NoMetrics, SystemClock
from pipeline.transports.registry import open_transport, parse_url


async def main(url: str, settle: str) -> None:
    kept = settle.removeprefix("all-but:").encode()
    transport = await open_transport(parse_url(url), clock=SystemClock(), metrics=NoMetrics())
    async with asyncio.TaskGroup() as group:
        group.create_task(transport.source.run())
        print("READY", flush=True)
        while True:
            for delivery in await transport.source.receive():
                body = delivery.body or b""
                if settle != "none" and body != kept:
                    delivery.settle()
                    await transport.source.flush(Deadline(10))
                print("GOT", body.decode(), delivery.attempt, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
