"""What Ray says, and what an error of Ray's stands for; nothing here starts one."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import Any

import pytest

from brim.errors import LostError, RequestError
from brim.running.ray_cluster import LISTENER, CallResult, RayCluster, WorkerLostError, connected_ray


def test_of_what_rays_cluster_broadcasts_a_line_reaches_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = type(sys)("ray")
    ray.is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray)
    dump = "\n".join(f"    [state-dump] line {number}" for number in range(20))

    def broadcast() -> None:
        print(f"\x1b[33m(raylet)\x1b[0m Raylet is terminated. Last 20 lines of the Raylet logs:\n{dump}")
        print("\x1b[33m(raylet)\x1b[0m The node with node id: 3e8 has been marked dead because\n\t(1) it crashed")
        for _ in range(2):
            print("\x1b[33m(raylet)\x1b[0m No node has enough\x1b]0;x\x07 resources.\nMore of it")

    with connected_ray():
        thread = threading.Thread(target=broadcast, name=LISTENER)
        thread.start()
        thread.join()
        print("a word of somebody else")
    printed = capsys.readouterr()
    assert printed.out == "", "standard output is for the result"
    assert printed.err == "ray: No node has enough]0;x resources.\na word of somebody else\n"


@pytest.mark.parametrize("starts", [True, False])
def test_the_stop_signal_is_handled_as_before_once_ray_has_ended(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    ray: Any = type(sys)("ray")

    def init(**_: Any) -> Any:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as Ray does, for good
        if not starts:
            raise ConnectionError("nobody there")
        return ray

    ray.init, ray.is_initialized, ray.shutdown = init, lambda: False, lambda: None
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    before = signal.getsignal(signal.SIGTERM)
    with contextlib.nullcontext() if starts else pytest.raises(RequestError, match="nobody there"), connected_ray():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


class RayError(Exception):
    """As Ray's own."""

    def __init__(self, message: str = "", cause: Exception | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class NodeDiedError(RayError):
    """As Ray's own."""


class FakeRay:
    """Knows what becomes of each call, by its name; a stream is an iterator of names."""

    def __init__(self, **results: Any) -> None:
        self.exceptions = type("exceptions", (), {"RayError": RayError})
        self.results = results

    def wait(self, calls: list[Any], *, timeout: float | None, fetch_local: bool) -> tuple[list[Any], list[Any]]:
        ready = [call for call in calls if call not in ("later", "never")]
        return ready[:1], []

    def get(self, call: str) -> Any:
        result = self.results[call]
        if isinstance(result, Exception):
            raise result
        return result

    def nodes(self) -> list[dict[str, Any]]:
        here = {"NodeID": "1", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}
        return [here, {**here, "Alive": False}, {**here, "Resources": {"CPU": 8.0}}]


def test_the_first_answer_is_returned_or_none_after_the_timeout() -> None:
    cluster = RayCluster(FakeRay(first=1, second=2))
    assert cluster.next_result(["later", "first", "second"], seconds=1) == CallResult(call="first", value=1)
    stream = iter(["first", "second"])
    assert [cluster.next_result([stream], seconds=1) for _ in range(2)] == [
        CallResult(call=stream, value=1),
        CallResult(call=stream, value=2),
    ]
    assert cluster.next_result(["later", "never"], seconds=1) is None


@pytest.mark.parametrize(
    ("error", "lost", "words"),
    [
        (RayError("The actor died.\n exit detail: killed. Some common causes include: none."), True, "killed"),
        (NodeDiedError("Task failed\n\nThe node IP: 1.2.3.4"), True, "it no longer answers, as when its node is lost"),
        (RayError(cause=LostError("the device cannot be used again")), True, "the device cannot be used again"),
        (RayError(cause=RequestError("--data: no such file")), False, "--data: no such file"),
        (RayError(cause=KeyError("labels")), False, "'labels'"),
    ],
)
def test_a_lost_worker_is_distinguished_from_an_error_of_the_work(error: Exception, lost: bool, words: str) -> None:
    answer = RayCluster(FakeRay(call=error)).next_result(["call"])
    assert answer is not None
    assert (isinstance(answer.error, WorkerLostError), str(answer.error)) == (lost, words)


def test_a_long_message_of_rays_is_cut() -> None:
    answer = RayCluster(FakeRay(call=RayError("so much to say " * 100))).next_result(["call"])
    assert answer is not None
    assert len(str(answer.error)) <= 240


@pytest.mark.parametrize(("call", "expected"), [("first", 80), ("later", None), ("gone", None)])
def test_a_node_that_does_not_answer_is_reported_as_lost(
    monkeypatch: pytest.MonkeyPatch, call: str, expected: int | None
) -> None:
    cluster = RayCluster(FakeRay(first=80, gone=NodeDiedError()))
    monkeypatch.setattr("brim.running.ray_cluster._stay_on", lambda node: node)
    monkeypatch.setattr(cluster, "start_task", lambda function, **resources: call)
    if expected is None:
        with pytest.raises(LostError, match="a node of the cluster does not answer"):
            cluster.ask_nodes(lambda: None, having="GPU")
    else:
        assert cluster.ask_nodes(lambda: None, having="GPU") == [({"CPU": 8.0, "GPU": 2.0}, expected)]
