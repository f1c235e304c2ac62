"""The HTTP door to a reward model for reward functions: `POST http://{reward_router_address}/classify`.

Each reward worker has one, on the loopback device of its node, where its scorer processes are; nothing else reaches it.
Behind it the worker's client chooses the server.

    request   {"input": text | [text, ...]}   or   {"messages": [{"role", "content"}, ...]}
    answer    {"data": [{"index": 0, "probs": [score], "num_classes": 1}, ...]}

`/v1/chat/completions`, which generative reward models answer, is refused with 501.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rlflow.reward_loop.reward_model_client import Conversation, RewardModelClient
from rlflow.utils.errors import ContractError, RlflowError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_BODY_BYTES = 16 << 20
# Of the threads that wait for the event loop, beyond the client's own deadline.
GRACE_S = 30.0


class RewardRouter:
    """Serves the loop it is made in until `close`.

    Args:
        client: asked for scores.
    """

    def __init__(self, client: RewardModelClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._server = ThreadingHTTPServer((LOOPBACK, 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="reward router", daemon=True).start()

    @property
    def address(self) -> str:
        """host:port."""
        return f"{LOOPBACK}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Answer nothing more."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request; blocks the calling thread, not the event loop."""
        if path != "/classify":
            generative = " Generative reward models are not in this version." if path.startswith("/v1/") else ""
            return 501 if generative else 404, {"error": f"{path} is not served; POST /classify is.{generative}"}
        try:
            scores = [self._score(item) for item in _items(body)]
            data = [{"index": i, "probs": [future.result(self._limit())]} for i, future in enumerate(scores)]
        except ContractError as error:
            return 400, {"error": str(error)}
        except (RlflowError, TimeoutError) as error:
            return 503, {"error": str(error)}
        return 200, {"object": "list", "data": [{**item, "num_classes": 1} for item in data]}

    def _score(self, item: Conversation) -> Any:
        return asyncio.run_coroutine_threadsafe(self._client.score(item), self._loop)

    def _limit(self) -> float:
        return self._client.timeout_s + GRACE_S

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, reply = 413, {"error": f"a body of {size} bytes; at most {MAX_BODY_BYTES}"}
                if 0 <= size <= MAX_BODY_BYTES:
                    status, reply = router.answer(self.path, self.rfile.read(size))
                payload = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None:
                logger.debug(format, *args)

        return Handler


def _items(body: bytes) -> list[Conversation]:
    """The conversations and texts of a request; `ContractError` for anything else."""
    try:
        request = json.loads(body)
    except ValueError as error:
        raise ContractError(f"the body is no JSON: {error}") from error
    if not isinstance(request, dict) or ("input" in request) == ("messages" in request):
        raise ContractError('the body must be {"input": text or list of texts} or {"messages": [...]}')
    if "messages" in request:
        messages = request["messages"]
        if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
            raise ContractError("messages must be a list of {role, content}")
        return [messages]
    texts = request["input"] if isinstance(request["input"], list) else [request["input"]]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ContractError("input must be a text or a list of texts")
    return list(texts)
