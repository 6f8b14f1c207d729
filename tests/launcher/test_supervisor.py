"""The supervisor of a job, without processes: placement of hosts, failures and restarts."""

import pytest

from deepspeed_compress.launcher.placement import JobOptions, place, size_problem
from deepspeed_compress.launcher.supervisor import Supervisor


class Job:
    """A supervisor with its log, and the messages that it has sent to each agent, the latest last."""

    def __init__(
        self, hosts: int = 1, ranks: int = 2, restarts: int = 2, size_problem=lambda ranks: "", wait: float = 60.0
    ):
        self.log: list[str] = []
        self.supervisor = Supervisor(
            JobOptions("job", hosts, ranks, restarts, 30.0, wait), size_problem, self.log.append
        )
        self.sent: dict[str, list[dict]] = {}
        self.now = 0.0

    def lose(self, name: str) -> None:
        self.supervisor.disconnect(name, self.now, "was silent")
        self.deliver()

    def join(self, name: str, job: str = "job") -> None:
        self.say(name, "join", job=job, address=f"10.0.0.{name}", port=1000 + int(name))

    def say(self, name: str, kind: str, **message) -> None:
        self.supervisor.handle(name, {"kind": kind, **message}, self.now)
        self.deliver()

    def deliver(self) -> None:
        for name, message in self.supervisor.take_messages():
            self.sent.setdefault(name, []).append(message)

    def last(self, name: str) -> dict:
        return self.sent[name][-1]

    def fail(self, name: str, steps: int = 0, permanent: bool = False) -> None:
        start, rank = self.last(name)["start"], 2 * self.last(name)["node"]
        how = "was killed by SIGKILL"
        self.say(name, "failed", start=start, rank=rank, how=how, permanent=permanent, steps=steps)

    def stopped(self, *names: str, steps: int = 0, **error: object) -> None:
        for name in names:
            assert self.last(name)["kind"] == "stop"
            self.say(name, "stopped", start=self.last(name)["start"], steps=steps, port=2000 + int(name), **error)

    def pass_time(self, seconds: float, *alive: str, silent: float | None = None) -> None:
        """Advance the time second by second; the agents in `alive` send beats."""
        start = self.supervisor.status(self.now)["restarts"] + 1
        for _ in range(int(seconds)):
            self.now += 1.0
            for name in alive:
                self.say(name, "beat", start=start, silent=silent, steps=0)
            self.supervisor.tick(self.now)
            self.deliver()


def test_a_job_ends_when_all_ranks_are_done():
    job = Job(hosts=2)
    job.join("1")
    assert "1" not in job.sent
    job.join("2")
    assert job.last("1") == {
        "kind": "start",
        "start": 1,
        "restart": 0,
        "world": 4,
        "hosts": ["10.0.0.1", "10.0.0.2"],
        "port": 1001,
        "resume": False,
        "node": 0,
    }
    assert job.last("2")["node"] == 1
    job.say("1", "done", start=1)
    assert job.last("1")["kind"] == "start"
    job.say("2", "done", start=1)
    assert job.last("1") == job.last("2") == {"kind": "over", "code": 0, "why": ""}


def test_the_first_error_of_all_hosts_is_shown():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.fail("2")
    job.stopped("2", error="rank 3 failed: gloo timed out", error_time=9.0)
    job.stopped("1", error="rank 0 failed:\nURLError", error_time=7.0)
    assert [line for line in job.log if "first error" in line] == [
        "the first error: on 10.0.0.1, rank 0 failed:\nURLError"
    ]


def test_all_ranks_restart_after_all_have_stopped():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.fail("2", steps=7)
    assert job.last("1")["kind"] == job.last("2")["kind"] == "stop"
    job.stopped("1", steps=7)
    assert job.last("1")["kind"] == "stop"
    # Messages of earlier starts are ignored.
    job.say("2", "done", start=0)
    job.stopped("2", steps=8)
    assert (job.last("1")["start"], job.last("1")["port"], job.last("1")["resume"]) == (2, 2001, True)
    assert "rank 2 on 10.0.0.2 was killed by SIGKILL, after 7 steps" in job.log


def test_the_number_of_restarts_is_limited():
    job = Job(restarts=1)
    job.join("1")
    for _ in range(2):
        job.fail("1", steps=3)
        job.stopped("1", steps=3)
    assert (job.last("1")["kind"], job.last("1")["code"]) == ("over", 1)
    assert job.last("1")["why"] == "rank 0 on 10.0.0.1 was killed by SIGKILL, and no restart is left (--restarts 1)"


def test_a_restart_before_the_first_step_does_not_resume():
    job = Job()
    job.join("1")
    job.fail("1")
    job.stopped("1")
    assert job.last("1")["resume"] is False


def test_a_spare_host_replaces_a_lost_one():
    job = Job(hosts=2)
    for name in "123":
        job.join(name)
    assert "3" not in job.sent
    job.lose("1")
    job.stopped("2")
    assert (job.last("3")["node"], job.last("2")["node"]) == (0, 1)
    assert job.last("2")["hosts"] == ["10.0.0.3", "10.0.0.2"]


def test_fewer_ranks_restart_if_the_batch_allows_it():
    job = Job(hosts=2, size_problem=lambda ranks: "" if ranks == 2 else "no")
    job.join("1")
    job.join("2")
    job.lose("2")
    job.stopped("1")
    assert (job.last("1")["world"], job.last("1")["hosts"]) == (2, ["10.0.0.1"])


def test_the_job_waits_for_a_spare_if_fewer_ranks_cannot_train():
    job = Job(hosts=2, size_problem=lambda ranks: "12 is not divisible")
    job.join("1")
    job.join("2")
    job.lose("2")
    job.stopped("1")
    assert job.last("1")["kind"] == "stop"
    job.join("3")
    assert job.last("3")["node"] == 1
    job.lose("3")
    job.stopped("1")
    job.pass_time(70, "1")
    assert (job.last("1")["kind"], job.last("1")["code"]) == ("over", 1)
    assert "only 1 of 2 hosts are there" in job.last("1")["why"]
    assert "12 is not divisible" in job.last("1")["why"]


def test_the_first_start_waits_for_all_hosts():
    job = Job(hosts=2)
    job.join("1")
    job.pass_time(70, "1")
    assert job.last("1")["why"] == "after 60 s (--wait), only 1 of 2 hosts are there"


def test_a_job_hangs_if_no_rank_sends_heartbeats():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.pass_time(40, "1", "2", silent=None)
    assert job.last("1")["kind"] == "start", "a hang before every rank has sent a heartbeat"
    job.say("1", "beat", start=1, silent=29.0, steps=4)
    job.say("2", "beat", start=1, silent=25.0, steps=4)
    job.supervisor.tick(job.now + 4.0)
    job.deliver()
    assert job.last("1")["kind"] == "start", "a hang although one rank has sent a heartbeat"
    job.supervisor.tick(job.now + 6.0)
    job.deliver()
    assert job.last("1")["kind"] == "stop"
    assert "no heartbeat from any rank for 30 s (--hang), after 4 steps" in job.log


def test_a_signal_is_forwarded_and_ends_the_job():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.say("2", "end", number=15)
    assert job.last("1") == job.last("2") == {"kind": "pass", "number": 15, "start": 1}
    job.say("1", "done", start=1)
    job.say("2", "done", start=1)
    assert job.last("1") == {"kind": "over", "code": 143, "why": ""}


def test_a_signal_during_a_failure_prevents_the_restart():
    job = Job()
    job.join("1")
    job.fail("1")
    job.supervisor.handle("1", {"kind": "end", "number": 15}, job.now)
    job.supervisor.handle("1", {"kind": "stopped", "start": 1, "steps": 0, "port": 1}, job.now)
    job.deliver()
    assert job.last("1") == {"kind": "over", "code": 143, "why": ""}


@pytest.mark.parametrize("end", ["asked for", "out of restarts", "done"])
def test_a_host_that_was_lost_when_the_job_ended_learns_of_it_when_it_rejoins(end):
    """On a busy machine, the only agent may be silent for a long time."""
    job = Job(restarts=0)
    job.join("1")
    if end == "asked for":
        job.say("1", "end", number=15)
    if end == "done":
        job.say("1", "done", start=1)
    job.lose("1")
    job.join("2")
    message = job.last("2")
    assert (message["kind"], message["code"]) == ("over", {"asked for": 143, "out of restarts": 1, "done": 0}[end])
    assert ("cannot be reached: it was silent" in message["why"]) == (end == "out of restarts")


def test_agents_of_another_job_are_refused():
    job = Job()
    job.join("1")
    job.join("9", job="other")
    assert job.last("9") == {"kind": "refused", "why": "another job uses this address"}


@pytest.mark.parametrize(("spares", "dropped"), [(1, True), (0, False)])
def test_a_host_that_keeps_failing_before_the_first_step_is_replaced_by_a_spare(spares, dropped):
    job = Job(hosts=2, restarts=9)
    for number in range(2 + spares):
        job.join(str(number + 1))
    for steps in (0, 0, 5, 0, 0, 0):
        assert job.last("2")["hosts"] == ["10.0.0.1", "10.0.0.2"]
        job.fail("2", steps=steps)
        job.stopped("1", "2", steps=steps)
    assert (job.last("1")["hosts"] == ["10.0.0.1", "10.0.0.3"]) == dropped
    assert job.last("1")["kind"] == "start"


def test_hosts_keep_their_node_ranks():
    assert place("abc", 2, lambda count: True) == ("a", "b")
    assert place("bc", 2, lambda count: True, ("a", "b")) == ("c", "b")


@pytest.mark.parametrize(
    ("hosts", "fits", "count"), [("abcd", {1, 2}, 3), ("ab", {1, 2}, 2), ("ab", {1}, 1), ("a", {2}, 0), ("", {1}, 0)]
)
def test_the_most_hosts_that_fit_are_chosen(hosts, fits, count):
    assert len(place(hosts, 3, fits.__contains__)) == count


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (None, 2, "contain no DeepSpeed configuration"),
        ({}, 2, "/train_batch_size is None"),
        ({"train_batch_size": "auto"}, 2, "/train_batch_size is 'auto'"),
        ({"train_batch_size": 12}, 3, ""),
        ({"train_batch_size": 12}, 5, "is not divisible by 5 replicas"),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, 2, ""),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, 3, "is not divisible by 3"),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, 3, ""),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1},
            2,
            "leave out gradient_accumulation_steps",
        ),
        (
            {"train_batch_size": 12, "deepspeed_compress": {"parallelism": {"pipeline": 2}}},
            3,
            "not a multiple of tensor",
        ),
        ({"train_batch_size": 12, "deepspeed_compress": {"parallelism": {"pipeline": 2}}}, 4, ""),
    ],
)
def test_only_ranks_that_divide_the_batch_can_train(config, ranks, reason):
    found = size_problem(config, ranks)
    assert (reason in found) if reason else (found == "")


def test_a_configuration_error_ends_the_job_without_a_restart() -> None:
    job = Job(restarts=10)
    job.join("1")
    job.fail("1", permanent=True)
    job.stopped("1")
    assert job.last("1")["kind"] == "over"
    assert "a restart cannot help" in job.last("1")["why"]
