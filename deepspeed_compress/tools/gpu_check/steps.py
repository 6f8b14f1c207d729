"""Part 5: training with every ZeRO stage, whose results must not depend on the timing of streams."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from deepspeed_compress.tools.gpu_check.findings import Finding, Task
from deepspeed_compress.tools.gpu_check.ranks import Said, backend_here, missing, run_ranks

__all__ = ["findings", "judge", "judge_image", "train", "train_in_mirror"]

_RANKS, _STEPS = 2, 6
_STAGES = (0, 1, 2, 3)
_SEEDS = (None, None, 1, 2)
"""Seeds of pauses: two undisturbed runs, which must be equal to compare the others with, and two disturbed ones."""
_SIZES = {"cuda": (1024, 8), "cpu": (24, 3)}
"""Width and number of layers by device."""
_WEIGHTS = {"weights": {"method": "blockwise", "bits": 8, "block_size": 64}}
_REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_BLOCKED = "CUDA_LAUNCH_BLOCKING"
_GOAL, _DIFFERENT = "the same bits", "losses or weights differ"
_WORK = f"{__name__}:train"
_IMAGE = f"{__name__}:train_in_mirror"


def findings(task: Task) -> Iterator[Finding]:
    """Yield findings on each stage: it trains, and has the same bits again, with pauses, and with blocking launches."""
    if absent := missing():
        yield Finding("ZeRO 0 to 3", "not run", why=absent)
        return
    backend = backend_here(task.device, _RANKS)
    job = {"device": task.device, "backend": backend, "seeds": _SEEDS}
    yield Finding("how ranks talk", "pass", _how(task, backend))
    plain = run_ranks(_RANKS, _WORK, job, 0.5 * task.seconds, _REPEATABLE)
    for stage in _STAGES:
        yield from judge(stage, plain, task.on_gpu)
    alone = {"device": task.device, "backend": "mirror", "seeds": _SEEDS}
    image = run_ranks(1, _IMAGE, alone, 0.3 * task.seconds, _REPEATABLE)
    for stage in _STAGES:
        yield judge_image(stage, image)
    if not task.on_gpu:
        yield Finding(_BLOCKED, "not run", goal=_GOAL, why="needs CUDA")
        return
    blocking = run_ranks(_RANKS, _WORK, job | {"seeds": [None]}, 0.15 * task.seconds, {**_REPEATABLE, _BLOCKED: "1"})
    for stage in _STAGES:
        runs = [_runs(said, stage).get("0", []) for said in (plain, blocking)]
        yield _same(f"ZeRO {stage}, {_BLOCKED}", runs[0], runs[1:], blocking.trouble)


def _how(task: Task, backend: str) -> str:
    place = "a GPU each" if backend == "nccl" else "one GPU" if task.on_gpu else "the CPU"
    return f"{_RANKS} ranks on {place}, {backend}"


def judge(stage: int, plain: Said, on_gpu: bool) -> Iterator[Finding]:
    """Yield the findings on the runs of one stage."""
    runs = _runs(plain, stage)
    first = runs.get("0", [])
    wrong = _trouble(first, plain.trouble)
    losses = f"loss {first[0]['losses'][0]:.4g} to {first[0]['losses'][-1]:.4g}" if first and not wrong else ""
    yield Finding(f"ZeRO {stage}", "fail" if wrong else "pass", losses, "equal weights on all ranks", wrong)
    yield _same(f"ZeRO {stage}, again", first, [runs.get("1", [])], plain.trouble)
    late = [runs.get(str(number), []) for number in range(2, len(_SEEDS))]
    what = "streams" if on_gpu else "exchanges"
    yield _same(f"ZeRO {stage}, {what} late at random", first, late, plain.trouble)


def judge_image(stage: int, said: Said) -> Finding:
    """Check that results do not depend on when messages arrive, if only waiting ensures their arrival as in NCCL."""
    what = f"ZeRO {stage}, messages late at random, a mirror"
    runs = _runs(said, stage)
    if wrong := next((one["error"] for run in runs.values() for one in run if one["error"]), ""):
        return Finding(what, "fail", goal=_GOAL, why=wrong)
    if len(runs) < len(_SEEDS):
        return Finding(what, "fail", goal=_GOAL, why=said.trouble or "it did not get there")
    first, *others = (_bits(run) for run in runs.values())
    if first != others[0]:
        return Finding(what, "fail", goal=_GOAL, why="two undisturbed runs differ")
    equal = all(run == first for run in others)
    return Finding(what, "pass" if equal else "fail", f"runs: {len(others) - 1}", _GOAL, "" if equal else _DIFFERENT)


def _runs(said: Said, stage: int) -> Mapping[str, list[dict[str, Any]]]:
    """Return the results of the ranks by number of the run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for results in said.results:
        for one in results:
            if one["stage"] == stage:
                found.setdefault(str(one["run"]), []).append(one)
    return found


def _trouble(run: Sequence[Mapping[str, Any]], trouble: str) -> str:
    if len(run) < _RANKS:
        return trouble or "no rank got there"
    if errors := [one["error"] for one in run if one["error"]]:
        return str(errors[0])
    if len({one["weights"] for one in run}) > 1:
        return "ranks have different weights"
    return "" if run[0]["losses"][-1] < run[0]["losses"][0] else f"the loss does not fall: {run[0]['losses']}"


def _same(
    what: str, first: Sequence[Mapping[str, Any]], others: Sequence[Sequence[Mapping[str, Any]]], trouble: str
) -> Finding:
    """Check that `others` equal the `first` run bit for bit."""
    if wrong := _trouble(first, trouble):
        return Finding(what, "not run", goal=_GOAL, why=wrong)
    if wrong := next((found for run in others if (found := _trouble(run, trouble))), ""):
        return Finding(what, "fail", goal=_GOAL, why=wrong)
    if any(_bits(run) != _bits(first) for run in others):
        return Finding(what, "fail", goal=_GOAL, why=_DIFFERENT)
    return Finding(what, "pass", f"runs: {len(others)}", _GOAL)


def _bits(run: Sequence[Mapping[str, Any]]) -> list[tuple[list[float], str]]:
    return [(one["losses"], one["weights"]) for one in run]


def train(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the runs of every stage on a rank, undisturbed and with pauses. An error on all ranks ends one run."""
    for stage in _STAGES:
        for number, seed in enumerate(job["seeds"]):
            yield _tried(job["device"], stage, number, seed)


def _tried(device: str, stage: int, number: int, seed: int | None) -> dict[str, Any]:
    try:
        found = _train(device, stage, seed)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"stage": stage, "run": number, "losses": [], "weights": "", "error": ""} | found


def train_in_mirror(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the runs of every stage on the one real rank, with messages that arrive at once and late."""
    import torch.distributed as dist

    from deepspeed_compress.tools.gpu_check.mirror import Late, Mirror

    for stage in _STAGES:
        for number, seed in enumerate(job["seeds"]):
            late = None if seed is None else Late(job["device"], seed)
            for group in dist.distributed_c10d._world.pg_map:
                assert isinstance(group, Mirror)
                group.late = late
            yield _tried(job["device"], stage, number, None)


def _train(device: str, stage: int, seed: int | None) -> dict[str, Any]:
    from deepspeed_compress.tools.gpu_check.torture import late_streams
    from deepspeed_compress.tools.gpu_check.workload import INT4, digest, make_engine, network, train_step

    width, layers = _SIZES[device]
    model, batch = network(width, layers)
    section = {**INT4, **(_WEIGHTS if stage else {})}
    engine = make_engine(model, device, stage, section, bucket=2 * width * width)
    with late_streams(engine, stage, seed) if seed is not None else nullcontext():
        losses = [train_step(engine, *batch) for _ in range(_STEPS)]
    found = {"losses": [float(loss) for loss in losses], "weights": digest(engine)}
    engine.destroy()
    return found
