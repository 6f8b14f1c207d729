"""The two agents of launch/agents: their parts compared with simple references, and a few updates of the whole."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_compress.config import find_problems
from launch.agents.noise import Actor, NoiseScale, divergence, target_divergence
from launch.agents.policy import Policy, SplitHead
from launch.agents.tasks import ACTIONS, FRAMES, SEEN, TASKS, Carts, collect, evaluate
from launch.agents.update import Experience, Objective, vtrace
from launch.studies.agents import SETTINGS, Run, draw, rows
from launch.train_agents import CONFIG, main, parse_options, read_config, renewals
from tests.support.forks import run_forks

SAMPLED = pytest.mark.sampled(2, "tests/agents/test_agents.py")


def by_definition(ratios: Tensor, rewards: Tensor, discounts: Tensor, values: Tensor, trace: float) -> list[float]:
    """Return the targets of one cart, computed as the sum of equation (1) of arXiv:1802.01561."""
    cut = ratios.clamp(max=1.0).tolist()
    r, d, v = rewards.tolist(), discounts.tolist(), values.tolist()
    found = []
    for s in range(len(r)):
        total, weight = v[s], 1.0
        for t in range(s, len(r)):
            total += weight * cut[t] * (r[t] + d[t] * v[t + 1] - v[t])
            weight *= d[t] * trace * cut[t]
        found.append(total)
    return found


def drawn(steps: int = 7, carts: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ratios, rewards, discounts (some of them 0) and values."""
    generator = torch.Generator().manual_seed(3)
    ratios = torch.rand(steps, carts, generator=generator, dtype=torch.float64) * 2
    rewards = torch.randn(steps, carts, generator=generator, dtype=torch.float64)
    values = torch.randn(steps + 1, carts, generator=generator, dtype=torch.float64)
    discounts = 0.9 * (torch.rand(steps, carts, generator=generator) > 0.2).double()
    return ratios, rewards, discounts, values


@pytest.mark.parametrize("trace", [1.0, 0.8])
def test_vtrace_is_what_its_definition_says(trace: float) -> None:
    ratios, rewards, discounts, values = drawn()
    targets, advantages = vtrace(ratios, rewards, discounts, values, trace)
    for cart in range(5):
        own = by_definition(ratios[:, cart], rewards[:, cart], discounts[:, cart], values[:, cart], trace)
        torch.testing.assert_close(targets[:, cart], torch.tensor(own, dtype=torch.float64))
    after = torch.cat((targets[1:], values[-1:]))
    expected = ratios.clamp(max=1) * (rewards + discounts * after - values[:-1])
    torch.testing.assert_close(advantages, expected)


def test_on_its_own_policy_vtrace_is_the_return() -> None:
    """With ratios of 1 and `trace=1`, a target is the discounted sum of the remaining rewards and the last value."""
    _, rewards, discounts, values = drawn()
    targets, _ = vtrace(torch.ones_like(rewards), rewards, discounts, values, trace=1.0)
    total = values[-1]
    for step in reversed(range(len(rewards))):
        total = rewards[step] + discounts[step] * total
        torch.testing.assert_close(targets[step], total)


def test_what_did_nothing_changes_nothing() -> None:
    """A step of ratio 0 keeps its value, whatever its reward and the steps after it."""
    ratios, rewards, discounts, values = drawn()
    ratios[3] = 0.0
    targets, advantages = vtrace(ratios, rewards, discounts, values)
    torch.testing.assert_close(targets[3], values[3])
    assert not advantages[3].any()


def experience(log_likely: float, steps: int = 4, carts: int = 3) -> Experience:
    none = torch.zeros(steps, carts, dtype=torch.bool)
    return Experience(
        torch.zeros(steps + 1, carts, FRAMES, SEEN),
        torch.zeros(steps, carts, dtype=torch.int64),
        torch.full((steps, carts), log_likely),
        torch.arange(float(steps * carts)).view(steps, carts),
        none,
        ~none,
    )


def test_correction_is_none_where_actors_have_the_newest_weights() -> None:
    logits, values = torch.zeros(5, 3, ACTIONS), torch.linspace(0, 1, 15).view(5, 3)
    same, rare = experience(math.log(0.5)), experience(math.log(0.9))
    corrected, plain = Objective(True), Objective(False)
    assert float(corrected(logits, values, same)) == float(plain(logits, values, same))
    assert float(corrected(logits, values, rare)) != float(plain(logits, values, rare))
    assert float(plain(logits, values, rare)) == float(plain(logits, values, same))


def one_head(rank: int) -> list[list[float]]:
    """Return the outputs and mean gradients (features, weight, bias) of the split head and of an unsplit one."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    split, whole = SplitHead(6, 4), nn.Linear(6, 4)
    whole.load_state_dict(split.state_dict())
    split.group = dist.group.WORLD
    own = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    found = []
    for head in (split, whole):
        features = own.clone().requires_grad_()
        outputs = head(features)
        (outputs * torch.arange(12.0).view(3, 4) * (rank + 1)).sum().backward()
        gradients = [head.weight.grad, head.bias.grad]
        for gradient in gradients:
            dist.all_reduce(gradient)
        found.append(torch.cat([one.flatten() for one in (outputs, features.grad, *gradients)]).tolist())
    dist.destroy_process_group()
    return found


def test_a_split_head_is_the_whole_one() -> None:
    for split, whole in run_forks(2, one_head):
        assert split == pytest.approx(whole, rel=1e-5, abs=1e-5)


def indivisible(rank: int) -> str:
    dist.init_process_group("gloo")
    head = SplitHead(6, 3)
    head.group = dist.group.WORLD
    try:
        head(torch.ones(1, 6))
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def test_a_head_that_cannot_be_split_says_so() -> None:
    assert run_forks(2, indivisible) == ["3 outputs are not divisible by 2 ranks"] * 2


def adapted(rank: int) -> list[float]:
    """Return the noise scales after two divergences.

    The mean of the first one is above the target, that of the second one below it. One rank is always below it.
    """
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    scale, found = NoiseScale(1.0, 0.05, dist.group.WORLD, factor=2.0), []
    for mine in ((0.2, 0.01), (0.06, 0.03)):
        scale.adapt(torch.tensor(mine[rank]))
        found.append(scale.std)
    dist.destroy_process_group()
    return found


def test_all_ranks_have_the_scale_of_their_mean() -> None:
    assert run_forks(2, adapted) == [[0.5, 1.0]] * 2


def test_the_target_is_the_divergence_of_random_actions() -> None:
    """The policy is certain, and is compared with one that sometimes takes a random action."""
    sure = torch.tensor([[40.0, 0.0, 0.0, 0.0]])
    now_and_then = torch.log(0.9 * torch.softmax(sure, -1) + 0.1 / 4)
    assert float(divergence(sure, now_and_then)) == pytest.approx(target_divergence(0.1, 4), rel=1e-5)


def test_noise_is_in_what_is_learnt_but_norms_and_value() -> None:
    torch.manual_seed(0)
    policy = Policy(FRAMES, SEEN, ACTIONS)
    actor = Actor(lambda: Policy(FRAMES, SEEN, ACTIONS), torch.Generator().manual_seed(0))
    actor.renew(policy)
    actor.perturb(0.0)
    windows = torch.randn(9, FRAMES, SEEN)
    torch.testing.assert_close(actor.logits(windows), policy(windows)[0].detach())
    assert float(actor.divergence(windows)) == pytest.approx(0.0, abs=1e-6)
    actor.perturb(0.1)
    changed = {name for name, weight in actor._noisy.named_parameters() if not weight.equal(policy.get_parameter(name))}
    assert {name for name, _ in policy.named_parameters()} - changed == {
        name for name, _ in policy.named_parameters() if "norm" in name or name.startswith("value")
    }


def test_an_episode_ends_once_and_another_begins() -> None:
    carts, generator = Carts(TASKS[0], 6, seed=1), torch.Generator().manual_seed(0)
    seen = collect(carts, lambda windows: torch.zeros(len(windows), ACTIONS), 80, generator)
    ended = seen.terminated[:-1]
    assert ended.any()
    # Only the step after an end starts an episode. It has no reward, and all its frames are the first one.
    assert torch.equal(~seen.valid[1:], ended)
    assert not seen.rewards[~seen.valid].any()
    first = seen.windows[1:][~seen.valid]
    assert torch.equal(first, first[:, -1:].expand_as(first))
    assert seen.rewards[seen.valid].eq(1).all()


def follow(windows: Tensor) -> Tensor:
    """Return logits that choose action 1 if the pole leans to the right."""
    return windows[:, -1, 2:3] * torch.tensor([-1.0, 1.0])


def test_the_tasks_are_opposite() -> None:
    """Actions that balance the pole of one task for a while throw over that of the other."""
    right, wrong = (evaluate(task, follow, 4, seed=0) for task in TASKS)
    assert right > 1.5 * wrong


def test_the_configuration_is_valid() -> None:
    assert find_problems(json.loads(CONFIG.read_text()), 4) == []


def run_program(rank: int, *argv: str) -> None:
    main(argv)


@SAMPLED
@pytest.mark.parametrize("arguments", [("--exchange-every", "2"), ("--exchange-every", "0", "--correction", "none")])
def test_agents_train(arguments: tuple[str, ...], tmp_path: Path) -> None:
    run_forks(4, run_program, *f"--output-dir {tmp_path} --updates 4 --score-every 4".split(), *arguments)
    found = json.loads((tmp_path / "seed_0.json").read_text())
    assert [point["update"] for point in found["curve"]] == [4]
    assert len(found["curve"][0]["returns"]) == 2
    assert all(8 <= value <= 500 for value in found["curve"][0]["returns"])
    assert found["bytes"]["bytes_uncompressed"] > 4 * found["bytes"]["bytes_sent"]


def study_run(*returns: float) -> Run:
    updates = tuple(10 * number for number in range(1, len(returns) + 1))
    return Run(updates, returns, {"bytes_sent": 1500.0, "bytes_uncompressed": 12000.0, "bytes_islands": 300.0})


def test_the_study_says_what_runs_have_come_to(tmp_path: Path) -> None:
    found = {"good": [study_run(20, 410, 390, 430), study_run(30, 40, 50, 60)], "bad": [study_run(9, 9, 9, 9)]}
    assert rows(found)[2:] == [
        "| good | 230 (410, 50) | 40, - | 1.5 | 12.0 | 0.3 |",
        "| bad | 9 (9) | - | 1.5 | 12.0 | 0.3 |",
    ]
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_of_the_study_are_options(name: str) -> None:
    options = parse_options(["--output-dir", "runs", *SETTINGS[name]])
    assert renewals(options, read_config(options, 2)) == (1 if name == "every update" else 10)
