"""A clock that passes only when somebody works or sleeps, and a machine whose readings are planted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from effexport.base.machine import CoreTimes, Machine


class FakeClock:
    """Time that passes only when somebody works or sleeps. log: who worked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.log.append("pause")
        self.now += seconds

    def worker(self, name: str, seconds: float) -> Callable[[], None]:
        def work() -> None:
            self.log.append(name)
            self.now += seconds

        return work


class PlantedMachine(Machine):
    """Two cores that are idle unless told otherwise.

    waited: seconds that our threads have waited; None if the system does not tell. own: our CPU time. others, stolen:
    cores that others use all the time; None if the system does not tell.
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.cores = 2
        self.clock = clock
        self.waited: float | None = 0.0
        self.own = 0.0
        self.others: float | None = 0.0
        self.stolen = 0.0

    def own_seconds(self) -> float:
        return self.own

    def waits(self) -> dict[str, float] | None:
        return None if self.waited is None else {"1": self.waited}

    def is_waiting(self) -> bool:
        return False

    def core_times(self) -> CoreTimes | None:
        if self.others is None:
            return None
        now = self.clock()
        return CoreTimes(now, self.own, self.own + self.others * now, self.stolen * now)


def waiting(machine: PlantedMachine, work: Callable[[], object], waits: Iterator[float]) -> Callable[[], None]:
    """The same work, during which our threads wait as long as planted, one entry a run, then never."""

    def run() -> None:
        assert machine.waited is not None
        machine.waited += next(waits, 0.0)
        work()

    return run
