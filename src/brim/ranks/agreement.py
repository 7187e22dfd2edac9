"""Ranks that agree: every rank reports its result, and all continue, or all stop with the same error.

Votes travel on a gloo group of their own, so that they never meet a collective of the training step half-way.
They are JSON text, not pickles: what a peer sends is data and never code. Knows nothing of what is voted on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar, cast

from brim.errors import BrimError, RankError, RequestError, first_line
from brim.ranks.presence import (
    Facts,
    Presence,
    Trouble,
    WaitWatcher,
    await_arrival,
    ended_ranks,
    process_names,
    processes_here,
    rank_names,
)
from brim.ranks.world import World, current_world
from brim.storage.fingerprint import differing_parts
from brim.storage.run_folder import check_folder
from brim.storage.run_lock import locked_folder

__all__ = ["Agreement", "Step", "Vote", "check_same_work", "shared_folder", "stop_signal_as_error"]

T = TypeVar("T")

ARRIVAL_POLL_SECONDS = 0.05  # between two checks which ranks have arrived
ENDED_CHECK_SECONDS = 1.0  # between two checks which ranks have ended, while waiting
FAILURE_CHECK_SECONDS = 3.0  # the same while at work: a check costs some messages for each rank


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What one rank brings to a vote: a value made of JSON types, or the error it had instead."""

    value: Any = None
    error: Exception | None = None


class Step(Generic[T]):
    """Work that all ranks do, each on its own; at its end all have every rank's value, in rank order, in `values`.

    If it raises on any rank, all raise the same `RankError`, on a rank that failed itself from its own exception. A
    value is made of JSON types, or of a class with `to_json` and `from_json`. Alone, errors and values pass unchanged.
    """

    def __init__(self, agreement: Agreement, kind: type[T]) -> None:
        self.value: T | None = None
        self.values: list[T] = []
        self._agreement = agreement
        self._kind: Any = kind

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt: this rank leaves
        if self._agreement.world.size == 1:
            self.values = [cast(T, self.value)]
            return
        typed = hasattr(self._kind, "from_json")
        value: Any = self.value
        plain = value.to_json() if typed and value is not None else value
        gathered = self._agreement.gather(Vote(value=plain, error=error))
        self.values = [self._kind.from_json(one) if typed and one is not None else one for one in gathered]


class Agreement:
    """Where all ranks exchange results, or learn that one of them cannot.

        with Agreement() as agreement:
            with agreement.step(int) as step:
                step.value = find(workload).size
            size = min(step.values)  # every rank has every size

    Every rank must enter it, and make the same calls in the same order. Alone (one rank) nothing is started
    and errors pass through unchanged. A rank that does not come within `timeout_seconds` of another's call
    is given up: choose more than the ranks may differ in how long they take. A `patient` one waits without end for
    ranks that are alive, and for none that is gone; `check` between the calls raises early where a rank has failed.
    A wait of more than half a minute is a warning that names the missing ranks; `purpose` says there what the ranks
    are doing.
    """

    def __init__(
        self, *, timeout_seconds: float = 600.0, patient: bool = False, purpose: str = "work that they share"
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.patient = patient
        self.purpose = purpose
        self.world: World = World(0, 1, 0)
        self._group: Any = None
        self._store: Any = None  # where ranks record that they have arrived
        self._name = ""
        self._round = 0
        self._watcher = WaitWatcher()
        self._facts: dict[int, Facts] = {}  # where each rank runs, if a store records it
        self._lost: str | None = None  # why no further vote is possible
        self._presence: Presence | None = None
        self._checked_at = 0.0
        self._seen_trouble: RankError | None = None  # what `check` raised

    def __enter__(self) -> Agreement:
        self.world = current_world()
        if self.world.size > 1:
            try:
                self._connect()
            except BaseException:
                self._disconnect()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disconnect()

    def step(self, kind: type[T]) -> Step[T]:
        """A piece of work that every rank does, and whose value, of this kind, each gives to all."""
        return Step(self, kind)

    def gather(self, vote: Vote) -> list[Any]:
        """Every rank's value in rank order, or on every rank a `RankError` about the first rank that failed."""
        if self.world.size == 1:
            if vote.error is not None:
                raise vote.error
            return [vote.value]
        assert self._group is not None, "gather() outside the `with` block"
        if vote.error is not None and vote.error is self._seen_trouble:
            vote = Vote()  # another rank's error, which that rank reports itself
        message, error = _encode(vote)
        if error is not None and self._presence is not None:
            self._presence.report_failure(**message["error"])
        try:
            votes = [json.loads(text) for text in self._exchange(json.dumps(message).encode())]
        except RankError as lost:
            if error is None:
                raise
            raise _rank_error([(self.world.rank, message["error"])], f"; besides, {lost}") from error
        failed = [(rank, vote["error"]) for rank, vote in enumerate(votes) if "error" in vote]
        if failed:
            raise _rank_error(failed) from error
        if self._seen_trouble is not None:
            raise self._seen_trouble
        return [vote["value"] for vote in votes]

    def check(self) -> None:
        """Raise a `RankError` if another rank has failed or is gone; cheap enough for every batch.

        Only a patient agreement knows. A rank that catches this should still call the next `gather`, where all ranks
        receive the same error.
        """
        if self._presence is None or time.monotonic() - self._checked_at < FAILURE_CHECK_SECONDS:
            return
        self._checked_at = time.monotonic()
        if (trouble := self.trouble()) is not None:
            self._seen_trouble = trouble.error()
            raise self._seen_trouble

    def trouble(self) -> Trouble | None:
        """Which other rank has failed or is gone, as far as a patient agreement knows."""
        return None if self._presence is None else self._presence.failure() or self._presence.gone()

    def processes_here(self) -> list[int]:
        """The processes of the ranks on this machine, as far as a store records them; none without ranks."""
        return list(processes_here(self._facts).values())

    def _connect(self) -> None:
        import torch.distributed as dist

        if not dist.is_available():
            raise RequestError(
                f"WORLD_SIZE is {self.world.size}, but this torch has no distributed support; run a single process"
            )
        self._name = f"brim/votes/{next(_agreements)}"
        try:
            self._store, self._group, self._facts = _meeting_place(self.world, self.timeout_seconds, self._watcher)
            if self.patient and self._store is not None:
                self._presence = Presence(self._store, self.world, self._name)
                self._presence.start()
        except ValueError as error:  # the environment lacks MASTER_ADDR or MASTER_PORT
            raise RequestError(f"cannot reach the other ranks: {error}; start with torchrun") from error
        except RuntimeError as error:
            raise RankError(
                f"rank {self.world.rank}: the {self.world.size} ranks did not all connect within "
                f"{self.timeout_seconds:g} s: {first_line(error)}"
            ) from error

    def _disconnect(self) -> None:
        """Leave; the group stays for the next agreement, unless it is broken."""
        self._group = None
        self._watcher.close()
        if self._presence is not None:
            self._presence.stop()
        if self._lost is not None:
            _kept_places.clear()

    def _exchange(self, payload: bytes) -> list[bytes]:
        """One message from each rank to all, in rank order; a lost rank is a `RankError`."""
        import torch

        if self._lost is not None:
            raise RankError(self._lost)
        self._round += 1
        self._announce()
        try:
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world.size)]
            with self._watcher.waiting(self._describe_wait):
                self._await_all()
                self._group.allgather([lengths], [torch.tensor([len(payload)], device="cpu")]).wait()
            sizes = [int(length) for length in lengths]
            padded = bytearray(payload.ljust(max(sizes), b"\0"))
            rows = [torch.zeros(max(sizes), dtype=torch.uint8, device="cpu") for _ in sizes]
            self._group.allgather([rows], [torch.frombuffer(padded, dtype=torch.uint8)]).wait()
        except RuntimeError as error:
            self._lost = self._describe_loss(error)
            raise RankError(self._lost) from error
        return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]

    def _announce(self) -> None:
        """Record in the shared store that this rank has arrived at this round, for ranks that wait for another."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key(self.world.rank), str(self._round))

    def _await_all(self) -> None:
        """In a patient agreement: wait until every rank has arrived at this round, or one of them has ended."""
        checked_at = 0.0
        while self._presence is not None and (self._missing() or checked_at == 0.0):
            if time.monotonic() - checked_at >= ENDED_CHECK_SECONDS:
                checked_at = time.monotonic()
                if (gone := self._presence.gone()) is not None:
                    self._lost = str(gone.error())
                    raise gone.error()
            time.sleep(ARRIVAL_POLL_SECONDS)

    def _missing(self) -> list[int]:
        """The ranks that have not arrived at this round, as far as the store knows."""
        missing: list[int] = []
        store = self._store
        with contextlib.suppress(RuntimeError):  # the store may have died with the rank that held it
            for rank in range(self.world.size):
                key = self._key(rank)
                if store is not None and (not store.check([key]) or int(store.get(key)) < self._round):
                    missing.append(rank)
        return missing

    def _describe_wait(self, seconds: float) -> str | None:
        """Whom this rank waits for; None if a lower one waits too, which warns for all."""
        missing = self._missing()
        if min(set(range(self.world.size)) - set(missing), default=self.world.rank) != self.world.rank:
            return None
        who = rank_names(missing, process_names(self._facts)) if missing else "the other ranks"
        if self.patient:
            bound = "there is no time limit while a rank's process lives: end it if it hangs"
        else:
            bound = f"brim gives up after {self.timeout_seconds:g} s in all"
        me = f"rank {self.world.rank} of {self.world.size}"
        return f"{me} has waited {seconds:.0f} s for {who} in {self.purpose}; {bound}"

    def _describe_loss(self, error: RuntimeError) -> str:
        missing = self._missing()
        names = ", ".join(map(str, missing))
        who = f"rank{'s' if len(missing) > 1 else ''} {names} did not answer" if missing else "another rank was lost"
        return (
            f"rank {self.world.rank}: {who} (of {self.world.size} ranks, waiting at most {self.timeout_seconds:g} s): "
            f"{first_line(error)}; see that rank's own output, then start again"
        )

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


def check_same_work(prints: Sequence[str]) -> None:
    """Every rank must have the same model, data and settings, by their combined fingerprints."""
    for rank, other in enumerate(prints):
        if other != prints[0]:
            parts = " and ".join(differing_parts(prints[0], other))
            raise RequestError(f"rank {rank} does not have the same {parts} as rank 0: give all ranks the same files")


# Ranks enter agreements in the same order, so the same number names the same one everywhere.
_agreements = itertools.count()
# Groups and stores are kept until the process ends: ranks that leave one while others still do, or come back to a port
# that is being closed, can wait for each other for ever.
_kept_places: dict[
    tuple[int, float], tuple[Any, Any, Any, dict[int, Facts]]
] = {}  # (default group, timeout): that group, store, gloo group, where each rank runs
_kept_store: list[Any] = []


@atexit.register
def _let_go_of_places() -> None:
    """While Python still runs: threads of a group that is taken down after it can abort the process (torch 2.6)."""
    _kept_places.clear()
    _kept_store.clear()


def _meeting_place(world: World, timeout_seconds: float, watcher: WaitWatcher) -> tuple[Any, Any, dict[int, Facts]]:
    """The store and the gloo group for votes: beside the user's default group, or, without one, on torchrun's store.

    No default group is made, so that the user can still make one. Gives also where each rank runs.
    """
    import torch.distributed as dist

    default = dist.group.WORLD if dist.is_initialized() else None
    place = _kept_places.get((id(default), timeout_seconds))
    if place is not None and place[0] is default:
        return place[1:]
    shared = _default_store() if default is not None else _launchers_store(world, timeout_seconds, watcher)
    store: Any = None
    facts: dict[int, Facts] = {}
    if shared is not None:
        store = dist.PrefixStore(f"brim/places/{next(_agreements)}", shared)  # type: ignore[attr-defined]
        try:
            facts = await_arrival(store, world, watcher, timeout_seconds)
        except BaseException:
            _kept_store.clear()  # a second attempt starts from nothing
            raise

    def describe(seconds: float) -> str | None:
        ended = ended_ranks(facts)
        if world.rank != 0 and 0 not in ended:
            return None
        who = f"{rank_names(ended, process_names(facts))}, which has ended" if ended else "the others"
        return (
            f"rank {world.rank} of {world.size} has waited {seconds:.0f} s for the connection to {who}; brim gives up "
            f"after {timeout_seconds:g} s in all"
        )

    timeout = timedelta(seconds=timeout_seconds)
    group: Any
    with watcher.waiting(describe):
        if default is not None:
            group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            group = dist.ProcessGroupGloo(store, world.rank, world.size, timeout)
    _kept_places[id(default), timeout_seconds] = (default, store, group, facts)
    return store, group, facts


def _launchers_store(world: World, timeout_seconds: float, watcher: WaitWatcher) -> Any:
    """torchrun's store, or one that rank 0 opens at MASTER_ADDR where no launcher has."""
    if not _kept_store:
        from torch.distributed.rendezvous import rendezvous

        def describe(seconds: float) -> str:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return (
                f"rank {world.rank} of {world.size} has waited {seconds:.0f} s for rank 0 at {address}, where nobody "
                f"answers; brim gives up after {timeout_seconds:g} s in all"
            )

        with watcher.waiting(describe):
            # As if in a world of one: rank 0 would else wait here, in silence, for ranks that cannot be named.
            found = rendezvous("env://", world.rank, 1, timeout=timedelta(seconds=timeout_seconds))
            _kept_store.append(next(found)[0])
    return _kept_store[0]


def _encode(vote: Vote) -> tuple[dict[str, Any], Exception | None]:
    """The vote to send, and this rank's error; a value that JSON cannot hold is an error like any other."""
    error = vote.error
    if error is None:
        try:
            json.dumps(vote.value)
            return {"value": vote.value}, None
        except (TypeError, ValueError, RecursionError) as caught:
            error = caught
    if isinstance(error, BrimError):
        message, exit_code = str(error), error.exit_code
    else:
        message, exit_code = f"{type(error).__name__}: {error}", RankError.exit_code
    return {"error": {"message": message, "exit_code": exit_code}}, error


def _rank_error(failed: list[tuple[int, dict[str, Any]]], also: str = "") -> RankError:
    rank, first = failed[0]
    if others := len(failed) - 1:
        also = f" ({others} other rank{'s' if others > 1 else ''} failed too)"
    return RankError(f"rank {rank}: {first['message']}{also}", exit_code=int(first["exit_code"]))


def _default_store() -> Any:
    """The store that the default group was made from; torch has no public name for it, so None is possible."""
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)
    return find() if find is not None else None


@contextlib.contextmanager
def shared_folder(
    agreement: Agreement,
    output: Path | None,
    *,
    command: str,
    check: Callable[[Path], None],
    note: Callable[[str], None] | None = None,
) -> Iterator[Path]:
    """The folder of a run of all ranks, which may outlive the agreement; alone it is `locked_folder` with a check.

    `check` is for rank 0, with the lock held: it raises for a folder whose content does not go with the run.
    """
    with contextlib.ExitStack() as stack:
        with agreement.step(str) as step:
            step.value = ""
            if agreement.world.rank == 0:
                chosen = stack.enter_context(locked_folder(output, command=command, note=note))
                check(chosen)
                step.value = str(chosen)
        folder = Path(step.values[0])
        if agreement.world.size > 1:
            with agreement.step(str):
                check_folder(folder)
        yield folder


class _Stopped(BaseException):
    """Not an `Exception`: what takes a sample's error for that sample's failure must not take this for one."""


@contextlib.contextmanager
def stop_signal_as_error(agreement: Agreement) -> Iterator[None]:
    """While inside, SIGTERM is a `RankError` that names the rank that was lost, as far as the agreement knows.

    torchrun sends it to every other rank as soon as one has ended. Alone, outside the main thread, or where somebody
    else handles the signal, nothing is changed. Processes that are forked meanwhile end by it as they usually do.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if agreement.world.size == 1 or not ours:
        yield
        return
    _end_children_by_it()
    signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    except _Stopped:
        raise _error(agreement) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(number: int, frame: object) -> NoReturn:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: what follows closes files
    raise _Stopped


@functools.cache
def _end_children_by_it() -> None:
    """A pool of processes ends its workers by SIGTERM and waits: one that took it for an error would stay."""

    def usual() -> None:
        if signal.getsignal(signal.SIGTERM) is _stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=usual)


def _error(agreement: Agreement) -> RankError:
    own = f"rank {agreement.world.rank} was stopped by the launcher (SIGTERM)"
    trouble = agreement.trouble()
    if trouble is None:
        return RankError(f"{own}, as torchrun does when a rank is lost; its report says which")
    return trouble.error(f"; {own}")
