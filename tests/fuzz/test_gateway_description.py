"""Schemathesis asks the served gateway what its description allows, what it forbids, and what lies between.

It enumerates the boundaries of every field and draws bodies that fit and that do not. Of each answer it
checks that it is no 500, that its status is described, that its body has the described form (of errors: the
dialect's own), that what is forbidden is refused, that other methods are refused by name, and that the same
request without the episode's token, or with another, is refused too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from schemathesis import Config, openapi
from schemathesis.engine import events, from_schema

from megloom.compute.gateway.protocol import Sampled
from tests.fuzz.gateway_service import GatewayService, Session
from tests.fuzz.openapi import ANSWERS, REQUESTS, description

AGENTS = ("coder", "judge")
NUM_DRAWN = 8  # bodies for each route in `make test`
LONG_S = 30  # of drawing bodies for each route in `make fuzz`, and a third of it without a token
SEED = 4  # of `make test`: every draw is the same
TEXT = 'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "/"}}\n</tool_call>'
# Drawn bodies, and the boundaries of every field one by one.
PHASES = pytest.mark.parametrize("phase", ["fuzzing", pytest.param("coverage", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayService]:
    made = GatewayService(tmp_path_factory.mktemp("chat"))
    made.start()
    ids = made.chat.encode(TEXT) + made.chat.stop_ids[:1]
    spans = ((3, 0, len(ids)),)
    made.steps = [(Sampled(token_ids=ids, logprobs=(-0.5,) * len(ids), version_spans=spans), "stop")]
    yield made
    made.stop()


def explore(
    service: GatewayService, session: Session, route: str, phase: str, token: str, *, long_s: int
) -> Counter[int]:
    """Asks one route; returns how many answers had which status. Raises: AssertionError with what broke."""
    host, port = service.address
    has_token = token == session.token
    is_fuzzed = settings.get_current_profile_name() == "fuzz"
    config = Config.from_dict(
        {
            "base-url": f"http://{host}:{port}{session.base}",
            "headers": {"Authorization": f"Bearer {token}"},
            "generation": {"max-examples": 200 if is_fuzzed else NUM_DRAWN, "database": "none"},
            "phases": {
                name: {"enabled": name == phase} for name in ("examples", "coverage", "fuzzing", "stateful")
            },
            "checks": {
                "positive_data_acceptance": {"enabled": False},  # what fits may be refused for what it means
                "unsupported_method": {"enabled": has_token},  # without it not even the method is told
            },
            **({"max-time": long_s} if is_fuzzed else {"seed": SEED}),
        }
    )
    schema = openapi.from_dict(description(AGENTS, has_token=has_token), config=config)
    statuses: Counter[int] = Counter()
    broken: list[str] = []
    for event in from_schema(schema.include(path=route)).execute():
        if isinstance(event, events.NonFatalError):
            broken.append(f"{event.label}: {event.value!r}")
        elif isinstance(event, events.FatalError):
            raise event.exception
        elif isinstance(event, events.ScenarioFinished):
            statuses += statuses_of(event)
            broken += failures_of(event)
    assert not broken, "\n\n".join([f"seed={config.seed}", *broken[:5]])
    return statuses


def statuses_of(scenario: events.ScenarioFinished) -> Counter[int]:
    answers = [asked.response for asked in scenario.recorder.interactions.values()]
    return Counter(answer.status_code for answer in answers if answer is not None)


def failures_of(scenario: events.ScenarioFinished) -> list[str]:
    """Each failed check with the request and the answer."""
    recorder = scenario.recorder
    told = []
    for case_id, checks in recorder.checks.items():
        for check in checks:
            if check.failure_info is not None:
                case, answer = recorder.cases[case_id].value, recorder.interactions[case_id].response
                shown: Any = answer and (answer.status_code, answer.content[:500])
                failure = check.failure_info.failure
                asked = f"{case.method} {case.path} {str(case.body)[:2000]}"
                told.append(f"{check.name}: {failure.title}: {failure.message}\n{asked}\n→ {shown}")
    return told


@pytest.mark.parametrize("route", ANSWERS)
@PHASES
def test_every_route_keeps_what_its_description_says(route: str, phase: str, service: GatewayService) -> None:
    with service.session() as session:
        statuses = explore(service, session, route, phase, session.token, long_s=LONG_S)
    needed = {200, 400} if route in REQUESTS else {200}
    if phase == "coverage":
        needed |= {401, 405}  # tokens taken away, other methods
    assert needed <= set(statuses), statuses


@pytest.mark.slow  # `test_guard.py` asks every route without a token, this with every kind of body too
@pytest.mark.parametrize("route", ANSWERS)
@pytest.mark.parametrize("phase", ["fuzzing", "coverage"])
def test_nothing_is_answered_without_the_episodes_token(
    route: str, phase: str, service: GatewayService
) -> None:
    with service.session() as session:
        statuses = explore(service, session, route, phase, f"{session.token}x", long_s=LONG_S // 3)
        assert set(statuses) == {401}, statuses
        assert not service.desk.calls
