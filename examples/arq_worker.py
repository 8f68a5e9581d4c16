from arq.connections import RedisSettings

from embedstream_client import AsyncClient


async def startup(ctx: dict) -> None:
    ctx["embedstream"] = AsyncClient.from_url("redis://localhost:6379", timeout=30)


async def shutdown(ctx: dict) -> None:
    await ctx["embedstream"].aclose()


async def embed(ctx: dict, texts: list[str]) -> list[list[float]]:
    embedded = await ctx["embedstream"].embed(texts, priority="bulk")
    return [vector.tolist() for vector in embedded.vectors]


class WorkerSettings:
    functions = [embed]
    on_startup = startup
    on_shutdown = shutdown
    redis_settings = RedisSettings.from_dsn("redis://localhost:6379/1")
    job_timeout = 60  # longer than the client's time-out
