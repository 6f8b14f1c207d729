"""The supervisor of a job, without processes: who gets which ranks, and what follows when some are lost."""

import pytest

from deepspeed_compress.launcher.failures import HOPELESS, PERMANENT
from deepspeed_compress.launcher.placement import Host, Placement, place
from deepspeed_compress.launcher.sizes import why_not
from deepspeed_compress.launcher.supervisor import LOST_AFTER, Supervisor, Terms


class Job:
    """A supervisor, and agents that do at once what they are told. `said`: to each agent, newest last."""

    def __init__(self, hosts: int = 1, ranks: int = 2, restarts: int = 2, why_not=lambda ranks: "", wait: float = 60.0):
        self.told: list[str] = []
        self.supervisor = Supervisor(Terms("job", hosts, ranks, restarts, 30.0, wait), why_not, self.told.append)
        self.said: dict[str, list[dict]] = {}
        self.now = 0.0

    def join(self, name: str, slots: int = 2, job: str = "job") -> None:
        self.say(name, "join", job=job, address=f"10.0.0.{name}", slots=list(range(slots)), port=1000 + int(name))

    def say(self, name: str, kind: str, **message) -> None:
        self.supervisor.handle(name, {"kind": kind, **message}, self.now)
        self.deliver()

    def deliver(self) -> None:
        for name, message in self.supervisor.take_messages():
            self.said.setdefault(name, []).append(message)

    def last(self, name: str) -> dict:
        return self.said[name][-1]

    def fail(self, name: str, slot: int = 0, steps: int = 0, code: int | None = None) -> None:
        start = self.last(name)["start"]
        rank = self.last(name)["first"] + slot
        how = "was ended by SIGKILL" if code is None else f"has ended with exit code {code}"
        self.say(name, "failed", start=start, rank=rank, slot=slot, how=how, code=code, steps=steps)

    def fail_alone(self, slot: int = 0, steps: int = 0, code: int | None = 1) -> None:
        """At the only host, whose ranks are gone then."""
        self.fail("1", slot, steps, code)
        self.stopped("1", steps=steps)

    def stopped(self, *names: str, steps: int = 0) -> None:
        for name in names:
            assert self.last(name)["kind"] == "stop"
            self.say(name, "stopped", start=self.last(name)["start"], steps=steps, port=2000 + int(name))

    def pass_time(self, seconds: float, *alive: str, silent: float | None = None) -> None:
        """In small parts, in which those that are `alive` beat."""
        start = self.supervisor.status(self.now)["restarts"] + 1
        for _ in range(int(seconds)):
            self.now += 1.0
            for name in alive:
                self.say(name, "beat", start=start, silent=silent, steps=0)
            self.supervisor.tick(self.now)
            self.deliver()


def test_a_job_that_ends_well():
    job = Job(hosts=2)
    job.join("1")
    assert "1" not in job.said
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
        "first": 0,
        "slots": [0, 1],
    }
    assert (job.last("2")["node"], job.last("2")["first"]) == (1, 2)
    job.say("1", "done", start=1)
    assert job.last("1")["kind"] == "start"
    job.say("2", "done", start=1)
    assert job.last("1") == job.last("2") == {"kind": "over", "code": 0, "why": ""}


def test_a_rank_is_lost_and_all_begin_again_when_all_are_gone():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.fail("2", steps=7)
    assert job.last("1")["kind"] == job.last("2")["kind"] == "stop"
    job.stopped("1", steps=7)
    assert job.last("1")["kind"] == "stop"
    # Those of the past are not listened to.
    job.say("2", "done", start=0)
    job.stopped("2", steps=8)
    assert (job.last("1")["start"], job.last("1")["port"], job.last("1")["resume"]) == (2, 2001, True)
    assert "rank 2 on 10.0.0.2 was ended by SIGKILL; after 7 steps" in job.told


def test_restarts_come_to_an_end():
    job = Job(restarts=1)
    job.join("1")
    for _ in range(2):
        job.fail("1", steps=3)
        job.stopped("1", steps=3)
    assert (job.last("1")["kind"], job.last("1")["code"]) == ("over", 1)
    assert job.last("1")["why"] == "rank 0 on 10.0.0.1 was ended by SIGKILL, and all 1 restarts are used"


def test_nothing_is_resumed_before_a_step_was_made():
    job = Job()
    job.join("1")
    job.fail("1")
    job.stopped("1")
    assert job.last("1")["resume"] is False


def test_a_spare_host_takes_the_place_of_the_lost():
    job = Job(hosts=2)
    for name in "123":
        job.join(name)
    assert "3" not in job.said
    job.supervisor.disconnect("1", job.now)
    job.deliver()
    job.stopped("2")
    assert (job.last("3")["node"], job.last("2")["node"]) == (0, 1)
    assert job.last("2")["hosts"] == ["10.0.0.3", "10.0.0.2"]


def test_silence_is_loss():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.pass_time(LOST_AFTER + 2, "1")
    assert job.last("1")["kind"] == "stop"
    assert "host 10.0.0.2 cannot be reached; after 0 steps" in job.told
    job.say("2", "beat", start=1, silent=None, steps=0)
    assert job.last("2") == {"kind": "unknown"}


def test_smaller_where_the_batch_allows_it():
    job = Job(hosts=2, why_not=lambda ranks: "" if ranks == 2 else "no")
    job.join("1")
    job.join("2")
    job.supervisor.disconnect("2", job.now)
    job.deliver()
    job.stopped("1")
    assert (job.last("1")["world"], job.last("1")["hosts"]) == (2, ["10.0.0.1"])


def test_where_it_does_not_a_spare_is_waited_for():
    job = Job(hosts=2, why_not=lambda ranks: "12 cannot be divided")
    job.join("1")
    job.join("2")
    job.supervisor.disconnect("2", job.now)
    job.deliver()
    job.stopped("1")
    assert job.last("1")["kind"] == "stop"
    job.join("3")
    assert job.last("3")["node"] == 1
    job.supervisor.disconnect("3", job.now)
    job.deliver()
    job.stopped("1")
    job.pass_time(70, "1")
    assert (job.last("1")["kind"], job.last("1")["code"]) == ("over", 1)
    assert "2 of 4 ranks have a place" in job.last("1")["why"]
    assert "12 cannot be divided" in job.last("1")["why"]


def test_at_first_all_are_waited_for():
    job = Job(hosts=2)
    job.join("1")
    job.pass_time(70, "1")
    assert job.last("1")["why"] == "2 of 4 ranks have a place after 60 s (--wait)"


def test_a_hang_is_silence_of_all_ranks():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.pass_time(40, "1", "2", silent=None)
    assert job.last("1")["kind"] == "start", "not before all have given a sign of life"
    job.say("1", "beat", start=1, silent=29.0, steps=4)
    job.say("2", "beat", start=1, silent=25.0, steps=4)
    job.supervisor.tick(job.now + 4.0)
    job.deliver()
    assert job.last("1")["kind"] == "start", "one of them was heard of"
    job.supervisor.tick(job.now + 6.0)
    job.deliver()
    assert job.last("1")["kind"] == "stop"
    assert "no rank has given a sign of life for 30 s; after 4 steps" in job.told


def test_who_asks_for_the_end_gets_it():
    job = Job(hosts=2)
    job.join("1")
    job.join("2")
    job.say("2", "end", number=15)
    assert job.last("1") == job.last("2") == {"kind": "pass", "number": 15, "start": 1}
    job.say("1", "done", start=1)
    job.say("2", "done", start=1)
    assert job.last("1") == {"kind": "over", "code": 143, "why": ""}


def test_an_end_that_crosses_a_failure_starts_nothing_again():
    job = Job()
    job.join("1")
    job.fail("1")
    job.supervisor.handle("1", {"kind": "end", "number": 15}, job.now)
    job.supervisor.handle("1", {"kind": "stopped", "start": 1, "steps": 0, "port": 1}, job.now)
    job.deliver()
    assert job.last("1") == {"kind": "over", "code": 143, "why": ""}


@pytest.mark.parametrize("end", ["asked for", "out of restarts", "done"])
def test_a_host_that_was_lost_when_the_job_ended_is_told_when_it_comes_back(end):
    """On a busy machine the only agent may be silent for long, and nobody else is there to hear of the end."""
    job = Job(restarts=0)
    job.join("1")
    if end == "asked for":
        job.say("1", "end", number=15)
    if end == "done":
        job.say("1", "done", start=1)
    job.pass_time(LOST_AFTER + 2)
    job.join("2")
    told = job.last("2")
    assert (told["kind"], told["code"]) == ("over", {"asked for": 143, "out of restarts": 1, "done": 0}[end])
    assert ("cannot be reached" in told["why"]) == (end == "out of restarts")


def test_agents_of_another_job_are_refused():
    job = Job()
    job.join("1")
    job.join("9", job="other")
    assert job.last("9") == {"kind": "refused", "why": "it is of another job"}


def test_a_slot_that_fails_before_a_step_time_after_time_gives_way_to_a_spare():
    job = Job(restarts=9)
    job.join("1", slots=3)
    for steps in (0, 0, 5, 0, 0, 0):
        assert job.last("1")["slots"] == [0, 1]
        job.fail("1", slot=1, steps=steps)
        job.stopped("1", steps=steps)
    assert job.last("1")["slots"] == [0, 2]
    for _ in range(3):
        job.fail("1", slot=0)
        job.stopped("1")
    assert job.last("1")["slots"] == [2], "smaller, since nothing speaks against it"


def test_a_slot_without_another_place_is_kept():
    job = Job(restarts=9, why_not=lambda ranks: "no")
    job.join("1")
    for _ in range(5):
        job.fail("1", slot=1)
        job.stopped("1")
    assert job.last("1")["slots"] == [0, 1]


def test_what_no_restart_cures_ends_the_job():
    """Of an error that all ranks run into any of them may be the first that is seen."""
    job = Job(restarts=9)
    job.join("1")
    for slot in (0, 1, 1):
        assert job.last("1")["kind"] == "start"
        job.fail_alone(slot, steps=7)
    assert (job.last("1")["kind"], job.last("1")["code"]) == ("over", 1)
    assert job.last("1")["why"] == (
        "rank 1 on 10.0.0.1 has ended with exit code 1, as 3 starts in a row have without a new step: no restart cures "
        "that; see its output above"
    )


def test_it_is_so_before_the_first_step_where_there_is_no_other_place():
    job = Job(restarts=9, why_not=lambda ranks: "no")
    job.join("1")
    for _ in range(HOPELESS):
        job.fail_alone(slot=1)
    assert job.last("1")["kind"] == "over"


@pytest.mark.parametrize(
    "failures",
    [
        [(7, None), (7, None), (7, None), (7, None)],
        [(7, 1), (7, 1), (7, None), (7, 1), (7, 1)],
        [(7, 1), (7, 1), (7, 3), (7, 1), (7, 1)],
        [(7, 1), (7, 1), (8, 1), (8, 1)],
        [(7, 1), (8, 1), (9, 1), (10, 1)],
    ],
    ids=["by signals", "a signal in between", "another exit code", "a new step", "new steps"],
)
def test_what_a_restart_may_cure_uses_restarts(failures):
    job = Job(restarts=9)
    job.join("1")
    for steps, code in failures:
        job.fail_alone(steps=steps, code=code)
        assert job.last("1")["kind"] == "start"


def test_a_slot_is_left_out_before_a_job_is_given_up():
    job = Job(restarts=9)
    job.join("1", slots=3)
    for slots in ([0, 1], [0, 2]):
        for _ in range(3):
            assert job.last("1")["slots"] == slots
            job.fail_alone(slot=slots[1])
    assert job.last("1")["slots"] == [0], "fewer, since nothing speaks against it"
    for _ in range(3):
        assert job.last("1")["kind"] == "start"
        job.fail_alone()
    assert job.last("1")["kind"] == "over"


def test_counting_begins_anew_when_hosts_come_or_go():
    job = Job(hosts=2, restarts=9)
    job.join("1")
    job.join("2")

    def fail():
        job.fail("1", steps=7, code=1)
        job.stopped("1", "2", steps=7)

    fail()
    fail()
    job.join("3")
    fail()
    assert job.last("1")["kind"] == "start"
    job.supervisor.disconnect("3", job.now)
    fail()
    assert job.last("1")["kind"] == "start"
    fail()
    assert job.last("1")["kind"] == "start"
    fail()
    assert job.last("1")["kind"] == "over"


def test_a_rank_that_raises_because_another_was_killed_is_not_given_up():
    """Whose end is heard of first is chance."""
    job = Job(hosts=2, restarts=9)
    job.join("1")
    job.join("2")
    for _ in range(4):
        start = job.last("2")["start"]
        job.fail("1", steps=7, code=1)
        job.say("2", "failed", start=start, rank=2, slot=0, how="was ended by SIGKILL", code=None, steps=7)
        job.stopped("1", "2", steps=7)
        assert job.last("1")["kind"] == "start"


HOSTS = [Host(name, (0, 1, 2, 3)) for name in "abc"]


def test_hosts_keep_their_ranks():
    former = place(HOSTS, 2, 4, lambda ranks: True)
    assert former is not None
    assert [host.name for host in former.hosts] == ["a", "b"]
    assert former.first_rank(1) == 4
    after = place(HOSTS[1:], 2, 4, lambda ranks: True, former)
    assert after is not None
    assert [host.name for host in after.hosts] == ["c", "b"]


@pytest.mark.parametrize(
    ("there", "fits", "shape"),
    [
        ([4, 4], {8}, (2, 4)),
        ([4, 3], set(), None),
        ([4, 3], {4, 6}, (2, 3)),
        ([4, 3], {4}, (2, 2)),
        ([4], {2}, (1, 2)),
        ([4, 1], {4, 2}, (1, 4)),
        ([], {1}, None),
    ],
)
def test_the_largest_that_fits(there, fits, shape):
    hosts = [Host(str(number), tuple(range(slots))) for number, slots in enumerate(there)]
    found = place(hosts, 2, 4, fits.__contains__)
    assert shape == (found and (len(found.hosts), len(found.hosts[0].slots)))
    assert isinstance(found, Placement | None)


@pytest.mark.parametrize(
    ("config", "ranks", "reason"),
    [
        (None, 2, "no DeepSpeed configuration"),
        ({}, 2, "/train_batch_size is None"),
        ({"train_batch_size": "auto"}, 2, "/train_batch_size is 'auto'"),
        ({"train_batch_size": 12}, 3, ""),
        ({"train_batch_size": 12}, 5, "cannot be divided over 5 replicas"),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, 2, ""),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, 3, "cannot be divided over 3"),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, 3, ""),
        (
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1},
            2,
            "leave out gradient_accumulation_steps",
        ),
        ({"train_batch_size": 12, "deepspeed_compress": {"parallelism": {"pipeline": 2}}}, 3, "no multiple of tensor"),
        ({"train_batch_size": 12, "deepspeed_compress": {"parallelism": {"pipeline": 2}}}, 4, ""),
    ],
)
def test_numbers_of_ranks_that_train_the_same_batches(config, ranks, reason):
    found = why_not(config, ranks)
    assert (reason in found) if reason else (found == "")


def test_an_error_of_the_configuration_is_not_started_again() -> None:
    job = Job(restarts=10)
    job.join("1")
    job.fail_alone(code=PERMANENT)
    assert job.last("1")["kind"] == "over"
    assert "no restart cures that" in job.last("1")["why"]
    assert "starts in a row" not in job.last("1")["why"]
