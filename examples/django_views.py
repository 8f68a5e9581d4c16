from django.http import HttpRequest, JsonResponse

from embedstream_client import Client, EmbedstreamError

# Connects at the first call, so it may be made before a server forks its workers.
client = Client.from_url("redis://localhost:6379", timeout=5)  # seconds, outages included


def search(request: HttpRequest) -> JsonResponse:
    try:
        ranking = client.rerank(request.GET["q"], request.GET.getlist("document"), top_n=3)
    except EmbedstreamError as error:
        return JsonResponse({"error": error.code}, status=503 if error.retryable else 400)
    return JsonResponse({"results": [{"text": r.document, "score": r.score} for r in ranking]})
