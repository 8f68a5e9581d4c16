"""Handlers of signals, where chance would have to hit: see tests/fault/test_interrupts.py for the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]

IN_A_CALLBACK = """
import os, signal, time, weakref
from pipeline.cli import interrupts

class Thing:
    pass

def callback(reference):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):  # the handler runs here, and Python drops what it raises
        pass

interrupts.watch()
interrupts.started()
thing = Thing()
reference = weakref.ref(thing, callback)
try:
    del thing
    time.sleep(60)
except KeyboardInterrupt:
    print("unwound", flush=True)
interrupts.leave(interrupts.status(0))
"""


def test_a_signal_inside_a_finalizer_is_not_lost() -> None:
    """K33: nothing is printed, the command unwinds, the status is the documented one."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CALLBACK], cwd=ROOT, capture_output=True, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, b"unwound\n", b"")
