"""A node's state store as a process of its own: `python -m megloom.compute.state.node <JSON>`.

The JSON: {"node", "index", "tiers": [{"tier", "root", "budget_bytes"}], "host", "port"}. The token comes from
MEGLOOM_STATE_TOKEN. Prints {"url"} as one line when it serves, and serves until SIGTERM or the end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megloom.compute.state.drafts import Surroundings
from megloom.compute.state.store import StateStore
from megloom.compute.state.tiers import Tier, TierPlan
from megloom.compute.state.transports.http_server import serving
from megloom.compute.store.offload import ThreadOffload

TOKEN_VARIABLE = "MEGLOOM_STATE_TOKEN"


async def serve(config: Mapping[str, Any], token: str) -> None:
    """Serves the store that `config` describes until it is told to stop.

    Raises: ValueError for an empty token; StateError if another process has the store open.
    """
    tiers = [
        TierPlan(tier=Tier(plan["tier"]), root=plan["root"], budget_bytes=plan.get("budget_bytes"))
        for plan in config["tiers"]
    ]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    with suppress(PermissionError):  # /dev/null and files cannot be waited for: then only SIGTERM ends it
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    with ThreadOffload("state-rows") as offload, ThreadOffload("state-bulk") as bulk:
        around = Surroundings(offload=offload, bulk=bulk)
        async with (
            StateStore.open(config["node"], tiers, Path(config["index"]), around) as store,
            serving(
                store, bulk, token=token, host=config.get("host", "127.0.0.1"), port=config.get("port", 0)
            ) as url,
        ):
            sys.stdout.write(json.dumps({"url": url}) + "\n")
            sys.stdout.flush()
            await stop.wait()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1]), os.environ.get(TOKEN_VARIABLE, "")))
