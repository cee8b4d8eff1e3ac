"""Whatever a program sends to the gateway, it gets an answer in its dialect, and nothing is left of it."""

from __future__ import annotations

import http.client
import json
import math
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megloom.compute.engines.answers import AnswerReader, decode_completion, whole
from megloom.compute.engines.protocol import (
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    GenerateRequest,
)
from megloom.compute.gateway.protocol import Sampled
from tests.compute.gateway.fakes import Step
from tests.fuzz.bodies import ANY_TEXT, OTHER_FIELDS, ROUTES, SOUND, TRAPS, body_of, encoded
from tests.fuzz.gateway_service import GatewayService, Session

ANSWER_S = 30.0  # for one answer; a connection that is silent for so long hangs
STATUSES = {200, 400, 401, 404, 405, 410, 413, 502, 503}  # those of dialects/errors.py but 500, our own fault
NUM_IDS = 40  # ids that the toy tokenizer has, bytes of half characters and markers among them

patient = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayService]:
    made = GatewayService(tmp_path_factory.mktemp("chat"))
    made.start()
    yield made
    made.stop()


def piece(
    ids: list[int], finish: str | None, *, lost: int = 0, first: int = 0, logprob: float = -0.5
) -> Step:
    """A piece of an answer; `lost` logprobs are missing."""
    logprobs = tuple(logprob for _ in ids[lost:])
    spans = ((1, first, first + len(ids)),) if ids else ()
    return Sampled(token_ids=tuple(ids), logprobs=logprobs, version_spans=spans), finish


def off_the_wire(ids: list[int], *, logprob: Any, is_stream: bool) -> Step:
    """What the engines' client makes of an answer whose logprobs are no numbers."""
    rid = "a" * 32
    meta = {
        "id": rid,
        "completion_tokens": len(ids),
        "output_token_logprobs": [[logprob, token_id, None] for token_id in ids],
        "weight_version": "1",
        "finish_reason": {"type": "stop"},
    }
    body = orjson.dumps({"output_ids": ids, "meta_info": meta})  # NaN becomes null
    asked = GenerateRequest(
        rid=rid, token_ids=(1,), max_tokens=9, temperature=1.0, seed=1, stop_token_ids=(), training=True
    )
    try:
        if is_stream:
            return next(AnswerReader(rid).read(b"data: " + body + b"\n\n"))
        return whole(decode_completion(body, asked))
    except EngineProtocolError as error:
        return error


IDS = st.lists(st.integers(0, NUM_IDS - 1), max_size=6)
LOGPROBS = st.sampled_from((-0.5, -0.5, -0.5, math.nan, -math.inf))
ENDINGS = st.sampled_from(("stop", "length", "abort"))


@st.composite
def engine_steps(draw: st.DrawFn) -> list[Step]:
    """What engines do: whole answers mostly, else lost tokens, logprobs that are no numbers, errors, an end
    without a reason.
    """
    steps: list[Step] = []
    first = 0
    for _ in range(draw(st.integers(0, 3))):
        ids = draw(IDS)
        lost, logprob = draw(st.sampled_from((0, 0, 0, 1))), draw(LOGPROBS)
        steps.append(piece(ids, None, lost=lost, first=first, logprob=logprob))
        first += len(ids)
    failure: list[Step] = [
        EngineUnavailable("engine gone"),
        EngineRefused("the context is too long"),
        off_the_wire([1, 2], logprob=draw(st.sampled_from((None, math.nan))), is_stream=draw(st.booleans())),
    ]
    last = draw(st.sampled_from((None, None, None, None, *failure)))
    steps.append(last or piece(draw(IDS), draw(ENDINGS), first=first, logprob=draw(LOGPROBS)))
    return steps


def ask(
    service: GatewayService, session: Session, path: str, body: bytes, **headers: str
) -> tuple[int, bytes]:
    """Posts a body; returns status and answer. Raises: TimeoutError if the connection hangs."""
    connection = http.client.HTTPConnection(*service.address, timeout=ANSWER_S)
    try:
        headers = {"Authorization": f"Bearer {session.token}", "Content-Type": "application/json", **headers}
        connection.request("POST", session.base + path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def check_answer(path: str, status: int, answer: bytes) -> None:
    """The answer is one of the documented kinds, in the dialect of its path."""
    assert status in STATUSES, (status, answer[:500])
    if status == 200 and answer.startswith((b"data:", b"event:")):
        assert answer.endswith(b"\n\n"), answer[-200:]
        for event in answer.split(b"\n\n"):
            for line in event.split(b"\n"):
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    json.loads(line[5:])
        return
    parsed: Any = json.loads(answer)
    if status == 200:
        assert "error" not in parsed or parsed["error"] is None
    elif path.startswith("/v1/messages"):
        assert (parsed["type"], type(parsed["error"]["message"])) == ("error", str)
    else:
        assert type(parsed["error"]["message"]) is str


@pytest.mark.parametrize("route", ROUTES)
@patient
@given(data=st.data())
def test_any_body_gets_an_answer_in_its_dialect(
    route: str, service: GatewayService, data: st.DataObject
) -> None:
    service.steps = data.draw(engine_steps())
    with service.session() as session:
        for body in data.draw(st.lists(body_of(route), min_size=1, max_size=2)):
            check_answer(route, *ask(service, session, route, body))


@patient
@given(data=st.data())
def test_a_sound_body_of_any_route_is_answered_after_any_other(
    service: GatewayService, data: st.DataObject
) -> None:
    service.steps = [piece([1, 2, 3], "length")]
    with service.session() as session:
        for route in data.draw(st.lists(st.sampled_from(list(ROUTES)), min_size=1, max_size=3)):
            check_answer(route, *ask(service, session, route, data.draw(body_of(route))))
        sound = encoded({"model": "coder", "messages": [{"role": "user", "content": "hello"}]})
        status, answer = ask(service, session, "/v1/chat/completions", sound)
        assert (status, math.isfinite(json.loads(answer)["usage"]["total_tokens"])) == (200, True)


@pytest.mark.parametrize("route", ROUTES)
def test_any_field_takes_any_kind_of_value(route: str, service: GatewayService) -> None:
    """Beside a lone surrogate, with which a body is read by the reader that takes more."""
    service.steps = [piece([1, 2, 3], "length")]
    with service.session() as session:
        assert ask(service, session, route, encoded(SOUND[route]))[0] == 200
        for field in OTHER_FIELDS:
            for trap in TRAPS:
                status, answer = ask(service, session, route, encoded(SOUND[route] | {field: trap}))
                assert status in STATUSES, (field, trap, status, answer[:300])


PATH = st.one_of(
    st.sampled_from(("/v1/models", "/v1/chat", "//v1/messages", "/v1/messages/", "/..%2f..%2f", "", "/v1")),
    ANY_TEXT.map(lambda text: "/" + quote(text, errors="surrogatepass")),
)


@patient
@given(path=PATH, method=st.sampled_from(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW")))
def test_any_path_gets_an_error_in_its_dialect(service: GatewayService, path: str, method: str) -> None:
    with service.session() as session:
        connection = http.client.HTTPConnection(*service.address, timeout=ANSWER_S)
        connection.request(method, session.base + path, headers={"x-api-key": session.token})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        if (method, path) == ("GET", "/v1/models"):
            assert response.status == 200
        else:
            assert response.status in (400, 401, 404, 405), (response.status, answer[:300])
            if response.status != 400:  # the server's own, for a request line that is no HTTP
                check_answer(path, response.status, answer)


@patient
@given(
    token=st.one_of(st.none(), st.binary(max_size=40).map(lambda raw: raw.hex()), ANY_TEXT),
    scheme=st.sampled_from(("Bearer ", "bearer", "Basic ", "")),
    route=st.sampled_from((*ROUTES, "/v1/models", "/nothing")),
)
def test_no_other_token_opens_any_route(
    service: GatewayService, token: str | None, scheme: str, route: str
) -> None:
    given_header = b"" if token is None else b"Authorization: " + scheme.encode() + _header(token) + b"\r\n"
    with service.session() as session:
        head = f"POST {session.base}{route} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n".encode()
        received = exchange(service, head + given_header + b"\r\n{}")
        assert received.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), received[:300]
        assert not service.desk.calls


def _header(text: str) -> bytes:
    """A header's value: its bytes but for line ends."""
    return text.encode("utf-8", "surrogatepass").replace(b"\r", b"").replace(b"\n", b"").replace(b"\0", b"")


@patient
@given(data=st.data())
def test_broken_http_neither_hangs_nor_leaves_anything(service: GatewayService, data: st.DataObject) -> None:
    service.steps = [piece([1, 2], None), piece([3], "stop", first=2)]
    route = data.draw(st.sampled_from(list(ROUTES)))
    sent_percent = data.draw(st.integers(0, 100))  # not of bytes: their number grows with the episode's name
    with service.session() as session:
        body = encoded(data.draw(ROUTES[route]))
        length = data.draw(st.sampled_from((str(len(body)), "0", "-1", "x", str(len(body) + 7), "9" * 30)))
        framing = data.draw(
            st.sampled_from(
                (
                    f"Content-Length: {length}",
                    "Transfer-Encoding: chunked",
                    f"Content-Length: {length}\r\nExpect: 1",
                )
            )
        )
        token = f"Authorization: Bearer {session.token}"
        head = f"POST {session.base}{route} HTTP/1.1\r\nHost: x\r\n{token}\r\n{framing}\r\n\r\n"
        whole = head.encode() + body
        received = exchange(service, whole[: len(whole) * sent_percent // 100])
        assert not received.startswith(b"HTTP/1.1 500"), received[:300]
        sound = encoded({"model": "coder", "messages": [{"role": "user", "content": "hello"}]})
        assert ask(service, session, "/v1/chat/completions", sound)[0] == 200


def exchange(service: GatewayService, sent: bytes) -> bytes:
    """Sends bytes and no more; returns what comes until the other side closes."""
    with socket.create_connection(service.address, timeout=ANSWER_S) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
        return received


@patient
@given(num_read=st.integers(0, 2000), num_pieces=st.integers(1, 200), is_stream=st.booleans())
def test_a_client_may_leave_at_any_byte(
    service: GatewayService, num_read: int, num_pieces: int, is_stream: bool
) -> None:
    service.steps = [piece([5], None, first=first) for first in range(num_pieces)]
    service.steps.append(piece([6], "length", first=num_pieces))
    body = {"model": "coder", "messages": [{"role": "user", "content": "hello"}], "stream": is_stream}
    raw = encoded(body)
    with service.session() as session:
        head = (
            f"POST {session.base}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {session.token}\r\nContent-Length: {len(raw)}\r\n\r\n"
        )
        with socket.create_connection(service.address, timeout=ANSWER_S) as connection:
            connection.sendall(head.encode() + raw)
            left = num_read
            while left > 0 and (data := connection.recv(left)):
                left -= len(data)
                if data.endswith((b"0\r\n\r\n", b"}")):
                    break
        # A later connection's answer: by now the gateway has read what came on the one before.
        assert ask(service, session, "/v1/chat/completions", encoded({**body, "stream": False}))[0] == 200
