"""Answers as real SGLang does where a session asks: its limits are not told, its name changes at an update.

Run as an interpreter is: `-c …` looks for sglang, which it has; `-m sglang.launch_server …` serves.
`stand_in.json` in the model's folder says what it does: `ids` are every answer, `is_ready` is what `/ready`
says, `end` ends it at once with this code. The pid of a child of its own is written beside it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web

KEEP_ALIVE_S = 5.0


class StandIn:
    """One server. Started by the command line that SGLang gets."""

    def __init__(self, arguments: list[str]) -> None:
        given = dict(pairwise(arguments))
        self.folder = Path(given["--model-path"])
        self.does = json.loads((self.folder / "stand_in.json").read_text())
        self.token, self.port = given["--api-key"], int(given["--port"])
        self.name, self.version = given["--served-model-name"], given["--weight-version"]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if request.path == "/ready":
            return web.Response(status=200 if self.does["is_ready"] else 503)
        if request.path == "/model_info":
            return web.json_response({"served_model_name": self.name, "weight_version": self.version})
        body = await request.json()
        if request.path == "/update_weights_from_disk":
            self.name, self.version = body["model_path"], body["weight_version"]
            return web.json_response({"success": True})
        if request.path != "/generate":
            return web.json_response({"success": True})
        return web.json_response(self.answer(body))

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.does["ids"]
        meta = {
            "id": body["rid"],
            "completion_tokens": len(ids),
            "output_token_logprobs": [[-0.5, token_id, None] for token_id in ids],
            "weight_version": self.version,
            "finish_reason": {"type": "stop"},
        }
        return {"output_ids": ids, "meta_info": meta}

    def start_child(self) -> None:
        """As SGLang's scheduler is a process of its own."""
        child = subprocess.Popen(["sleep", "600"])
        (self.folder / "child.pid").write_text(str(child.pid))

    async def serve(self) -> None:
        runner = web.ServerRunner(web.Server(self.handle), keepalive_timeout=KEEP_ALIVE_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        await asyncio.Event().wait()


if __name__ == "__main__" and sys.argv[1] == "-m":
    stand_in = StandIn(sys.argv[2:])
    if stand_in.does.get("end"):
        print(f"no device for this model, server_args={sys.argv}")
        sys.exit(stand_in.does["end"])
    stand_in.start_child()
    asyncio.run(stand_in.serve())
