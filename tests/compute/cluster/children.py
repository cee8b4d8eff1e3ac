"""Entries of processes that the cluster tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def write_and_end(args: dict[str, Any]) -> None:
    Path(args["path"]).write_text(f"{os.getpid()} {os.environ.get('COLOUR', '')}")


def fail(args: dict[str, Any]) -> None:
    print("about to fail", file=sys.stderr)
    raise RuntimeError(args["text"])


def sleep(args: dict[str, Any]) -> None:
    """Sleeps with a child of its own, whose pid it writes down; `stubborn` ignores SIGTERM."""
    if args.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(args["path"]).write_text(str(child.pid))
    time.sleep(600)
