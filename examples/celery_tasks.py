from celery import Celery

from embedstream_client import Client, EmbedstreamError

app = Celery("search", broker="redis://localhost:6379/1", backend="redis://localhost:6379/1")
client = Client.from_url(
    "redis://localhost:6379", timeout=30
)  # every worker process connects itself


@app.task(bind=True, max_retries=5)
def embed(task, texts: list[str]) -> list[list[float]]:
    try:
        return [vector.tolist() for vector in client.embed(texts, priority="bulk").vectors]
    except EmbedstreamError as error:
        if error.retryable:
            raise task.retry(exc=error, countdown=5) from error
        raise
