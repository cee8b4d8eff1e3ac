from pathlib import Path

import pytest

from megloom.compute.conductor.client import ServiceDown, ServiceError
from megloom.resources.compute_service import ComputeService
from tests.fake_service import FakeService, serving


def test_the_home_is_the_given_one_then_the_variable_then_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGLOOM_HOME", raising=False)
    assert ComputeService().home_path == tmp_path / ".megloom"
    monkeypatch.setenv("MEGLOOM_HOME", str(tmp_path / "elsewhere"))
    assert ComputeService().home_path == tmp_path / "elsewhere"
    assert ComputeService(home=str(tmp_path / "own")).home_path == tmp_path / "own"


@pytest.mark.parametrize("autostart", [True, False])
def test_a_running_service_is_connected_to(tmp_path: Path, autostart: bool):
    with serving(FakeService(tmp_path / "home")) as service:
        client = ComputeService(home=str(service.home), autostart=autostart).connect()
        assert client.health() == {"status": "ok"}


def test_without_autostart_a_service_that_is_down_stays_down(tmp_path: Path):
    with pytest.raises(ServiceDown, match="no service is running"):
        ComputeService(home=str(tmp_path), autostart=False).connect()
    assert list(tmp_path.iterdir()) == []


def test_the_fake_refuses_a_wrong_token(tmp_path: Path):
    with serving(FakeService(tmp_path)) as service:
        (service.home / "service.token").write_text("wrong")
        with pytest.raises(ServiceError, match="401: wrong token"):
            ComputeService(home=str(tmp_path), autostart=False).connect()
