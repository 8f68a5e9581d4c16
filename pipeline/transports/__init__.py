"""Transports: where requests come from and replies go. Read `actors/ports.py`, then `registry.py`.

One folder per kind with the same file names in each: `options`, `source`, `sink`, `ask`.
"""
