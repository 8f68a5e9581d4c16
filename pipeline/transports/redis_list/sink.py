"""Replies and dead letters of a Redis list source: those of a stream source, on the same server."""

from __future__ import annotations

from pipeline.transports.redis.sink import open_sink

__all__ = ["open_sink"]
