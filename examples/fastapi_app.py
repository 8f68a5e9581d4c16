from fastapi import FastAPI

from embedstream_client import AsyncClient

client = AsyncClient.from_url("redis://localhost:6379", timeout=5)  # seconds, outages included
app = FastAPI(lifespan=client.lifespan)


@app.post("/search")
async def search(query: str, documents: list[str]) -> list[str]:
    return [ranked.document for ranked in await client.rerank(query, documents, top_n=3)]
