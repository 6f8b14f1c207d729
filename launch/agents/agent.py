"""The agent, and the processes that run it: a `LitAgent` that asks the policy for a sum.

Nothing here knows how the policy is trained. The first rank of the training program serves the store at `--port`.
"""

import argparse
import os
from typing import Any, cast

import agentlightning
from openai import OpenAI

from deepspeed_compress.launcher.workers import die_with
from launch.agents.sums import Sum, reward


class Adder(agentlightning.LitAgent[dict[str, int]]):  # type: ignore[misc]  # Agent-Lightning has no types
    """Asks the policy for the sum of two numbers."""

    def rollout(self, task: dict[str, int], resources: agentlightning.NamedResources, rollout: Any) -> float:
        """Return the reward of the policy's answer."""
        policy = cast(agentlightning.LLM, resources["main_llm"])
        one = Sum(**task)
        client = OpenAI(base_url=policy.endpoint, api_key=policy.api_key or "none")
        answer = client.chat.completions.create(
            model=policy.model,
            messages=[{"role": "user", "content": one.question}],
            **policy.sampling_parameters,
        )
        return reward(one, answer.choices[0].message.content or "")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the agent, until training ends.")
    parser.add_argument("--port", type=int, required=True, help="port of the store")
    parser.add_argument("--runners", type=int, default=2, help="number of processes; default: 2")
    options = parser.parse_args()
    # Agent-Lightning forks the runners, which would survive this process if it is killed.
    os.register_at_fork(after_in_child=lambda: die_with(os.getppid()))
    strategy = agentlightning.ClientServerExecutionStrategy(
        role="runner", server_host="127.0.0.1", server_port=options.port, n_runners=options.runners
    )
    runner = {"type": "agentlightning.LitAgentRunner", "poll_interval": 0.1}
    trainer = agentlightning.Trainer(strategy=strategy, n_runners=options.runners, runner=runner)
    trainer.fit(Adder())


if __name__ == "__main__":
    main()
