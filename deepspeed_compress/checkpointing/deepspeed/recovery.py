"""Selection of the checkpoint to load: the newest complete one, in host memory or on disk.

Everything here is collective. All ranks decide alike, from what all of them have found.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.checkpointing.completeness import FileList, find_damaged, find_problems, list_file, write_list
from deepspeed_compress.checkpointing.deepspeed.memory_placement import HostMemory
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.memory_copies import write_checked
from deepspeed_compress.checkpointing.memory_directory import HostSave, Missing, find_host_saves, missing_files
from deepspeed_compress.collectives.objects import gather_objects, of_first
from deepspeed_compress.errors import CompressWarning, StateError
from deepspeed_compress.session.state_files import result_on_all

_CHUNK = 2**24


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be loaded.

    Attributes:
        directory: the directory of checkpoints.
        tag: its tag.
        step: its optimizer step; 0 if unknown.
        save: its identity among checkpoints in memory; None for a checkpoint on disk.
    """

    directory: Path
    tag: str
    step: int = 0
    save: tuple[int, str, str, int] | None = None


def find_complete(directory: Path, tag: str | None, memory: HostMemory | None, group: ProcessGroup) -> Candidate | None:
    """Return the checkpoint to load: `tag`, or the newest complete one if it is None. Collective.

    Warns (CompressWarning) of newer checkpoints that are not complete.

    Args:
        directory: the directory of checkpoints on disk.
        tag: the tag to load, or None.
        memory: checkpoints in host memory, considered as well.
        group: all ranks.

    Returns:
        The checkpoint; None if there is none at all.

    Raises:
        StateError: no checkpoint is complete. Raised on all ranks.
    """
    problems: list[str] = []
    for candidate in _candidates(directory, tag, memory, group):
        found = _problems(candidate, memory, group)
        if not found:
            for problem in problems:
                text = f"{problem}; {candidate.directory / candidate.tag} is loaded"
                warnings.warn(text, CompressWarning, stacklevel=6)
            return candidate
        problems += found
    if problems:
        raise StateError(f"no checkpoint is complete: {'; '.join(problems)}")
    return None


def find_newest_step(directory: Path, memory: HostMemory | None, group: ProcessGroup) -> int | None:
    """Return the step of the newest checkpoint that `find_complete` would try first; None if there is none."""
    return max((candidate.step for candidate in _candidates(directory, None, memory, group)), default=None)


def _candidates(directory: Path, tag: str | None, memory: HostMemory | None, group: ProcessGroup) -> list[Candidate]:
    """Return the checkpoints to try, newest first. For the same step, the one in memory comes first."""
    if tag is not None:
        return [Candidate(directory, tag)]
    found = result_on_all(lambda: _on_disk(CheckpointDirectory(directory)) if dist.get_rank() == 0 else [], group)
    on_disk, in_memory = of_first(found, group), [] if memory is None else _in_memory(memory, group)
    return sorted([*in_memory, *on_disk], key=lambda one: one.step, reverse=True)


def _on_disk(directory: CheckpointDirectory) -> list[Candidate]:
    """Return the candidates on disk. A damaged one that does not state its step keeps its place in the order."""
    tags = directory.tags_to_try()
    steps = {checkpoint.tag: checkpoint.step for checkpoint in directory.checkpoints()} if tags else {}
    known = list(accumulate([steps.get(tag) or 0 for tag in reversed(tags)], max))
    return [Candidate(directory.path, tag, step) for tag, step in zip(tags, reversed(known), strict=True)]


def _in_memory(memory: HostMemory, group: ProcessGroup) -> list[Candidate]:
    """Return the checkpoints in memory for which some host has each rank's files. Collective.

    Incomplete ones, such as one that was being written when training ended, are left out with a warning.
    """
    held, problems = find_host_saves(memory.directory) if memory.leads else ([], [])
    everybody = frozenset(range(dist.get_world_size(group)))
    problems += [
        f"{one.tag} in memory is ignored: it was saved by {one.world} ranks, but this job has {len(everybody)}"
        for one in held
        if one.world != len(everybody)
    ]
    seen = [(one.save, frozenset(one.lists)) for one in held if one.world == len(everybody)]
    found = gather_objects((seen, problems), group)
    problems = _all_of([some for _, some in found])
    candidates: list[Candidate] = []
    for save in sorted({save for some, _ in found for save, _ in some}, reverse=True):
        absent = everybody.difference(*(ranks for some, _ in found for other, ranks in some if other == save))
        if absent:
            problems.append(f"{save[1]} in memory is ignored: no host has the files of ranks {sorted(absent)}")
        else:
            candidates.append(Candidate(memory.directory, save[1], save[0], save))
    for problem in problems:
        warnings.warn(problem, CompressWarning, stacklevel=8)
    return candidates


def _problems(candidate: Candidate, memory: HostMemory | None, group: ProcessGroup) -> list[str]:
    """Return the reasons why `candidate` cannot be loaded; empty if it can. Collective."""
    if memory is not None and candidate.save is not None:
        return _bring_together(candidate, memory, group)
    place, rank, world = candidate.directory / candidate.tag, dist.get_rank(), dist.get_world_size()
    return _all_of(gather_objects(list(find_problems(place, rank, world)), group))


def _all_of(found: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(problem for some in found for problem in some))


def _bring_together(candidate: Candidate, memory: HostMemory, group: ProcessGroup) -> list[str]:
    """Send every host the files that its ranks need, and return the problems that prevent loading. Collective."""
    held = [one for one in find_host_saves(memory.directory)[0] if one.save == candidate.save]
    lists, damage = _look_through(held, candidate.directory / candidate.tag, memory)
    found = gather_objects((lists, damage), group)
    by_host = [{rank: one for local in ranks for rank, one in found[local][0].items()} for ranks in memory.hosts.ranks]
    everything = {rank: one for some in by_host for rank, one in some.items()}
    problems = _all_of([some for _, some in found])
    absent = sorted(set(range(dist.get_world_size(group))) - everything.keys())
    if absent:
        return [*problems, f"{candidate.tag} in memory: no host has all files of ranks {absent}"]
    here = frozenset(by_host[memory.hosts.here])
    missing = missing_files(everything, map(frozenset, by_host), map(frozenset, memory.hosts.ranks))
    failed = _fetch(list(missing), candidate, memory, {r: everything[r] for r in memory.hosts.ours if r not in here})
    failures = _all_of(gather_objects(failed, group))
    for problem in problems if not failures else ():
        warnings.warn(f"{problem}; the files of another host are used instead", CompressWarning, stacklevel=8)
    return failures


def _look_through(held: list[HostSave], place: Path, memory: HostMemory) -> tuple[Mapping[int, FileList], list[str]]:
    """Check this rank's share of its host's files.

    Returns:
        The file lists, by rank, whose files are all intact, and descriptions of the damage in others.
    """
    lists = sorted((one for some in held for one in some.lists.values()), key=lambda one: one.rank)
    ours = memory.hosts.ours
    whole: dict[int, FileList] = {}
    damage: list[str] = []
    for one in lists[ours.index(dist.get_rank()) :: len(ours)]:
        if found := list(find_damaged(place, one)):
            damage += found
        else:
            whole[one.rank] = one
    return whole, damage


def _fetch(
    missing: list[Missing], candidate: Candidate, memory: HostMemory, lists: Mapping[int, FileList]
) -> list[str]:
    """Transfer the missing files between the leaders of hosts, and write `lists` if all of them arrived.

    Returns:
        The failures on this host; empty on ranks that are not leaders.
    """
    if not memory.leads:
        return []
    place = candidate.directory / candidate.tag
    failed = [problem for one in missing if (problem := _pass_on(one, place, memory))]
    if not failed:
        try:
            for listed in lists.values():
                write_list(place, listed)
                list_file(place, listed.rank).chmod(0o600)
        except OSError as error:
            failed.append(f"{place}: {error}")
    return failed


def _pass_on(missing: Missing, place: Path, memory: HostMemory) -> str:
    """Send one file from the leader that has it to each that lacks it.

    A leader that cannot read or write the file still takes part in the communication, and returns the problem.
    """
    hosts, file, (size, sha256) = memory.hosts, place / missing.name, missing.listed.files[missing.name]
    if hosts.here == missing.source:
        return _send(file, size, [hosts.leaders[host] for host in missing.needed_by], memory.leaders)
    if hosts.here not in missing.needed_by:
        return ""
    chunks = _receive(size, hosts.leaders[missing.source], memory.leaders)
    try:
        place.mkdir(exist_ok=True)
        write_checked(chunks, file, sha256)
    except (OSError, StateError) as error:
        return f"{file}: {error}"
    finally:
        for _ in chunks:
            pass
    return ""


def _send(file: Path, size: int, ranks: list[int], group: ProcessGroup) -> str:
    """Send the file to `ranks`, and return what is wrong with it.

    If it cannot be read, zeros are sent in its place; they do not match the digest.
    """
    problem = ""
    try:
        content = torch.from_file(str(file), size=size, dtype=torch.uint8) if size else torch.empty(0)
    except RuntimeError as error:
        content, problem = torch.zeros(size, dtype=torch.uint8), f"{file}: {error}"
    for chunk in torch.split(content, _CHUNK) if size else ():
        for rank in ranks:
            dist.send(chunk, dst=rank, group=group)
    return problem


def _receive(size: int, source: int, group: ProcessGroup) -> Iterator[bytes]:
    """Yield the chunks of a file as they are received from the rank `source`."""
    for begin in range(0, size, _CHUNK):
        chunk = torch.empty(min(_CHUNK, size - begin), dtype=torch.uint8)
        dist.recv(chunk, src=source, group=group)
        yield chunk.numpy().tobytes()
