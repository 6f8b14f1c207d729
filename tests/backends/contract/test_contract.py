"""What every adapter must hold, for the programs of each engine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import filter as matching
from pathlib import Path

import pytest

from tests.backends.contract import ddp, fsdp2, megatron, zero
from tests.backends.contract.branches import Branching
from tests.backends.contract.fsdp2 import BOTH
from tests.support import attached, sharded, two_branches
from tests.support.attached import Case
from tests.support.forks import run_forks
from tests.support.messages import check_contained
from tests.support.two_branches import FOUR_BITS

PATIENCE = 400
"""Timeout in seconds for runs of many steps on a busy machine."""


def cases(default: Sequence[str], **tables: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Return the parametrization by the cases of each engine. CI has those that match a pattern."""
    found = {f"{engine} {name}": case for engine, table in tables.items() for name, case in table.items()}
    chosen = {pattern: matching(found, pattern) for pattern in default}
    assert all(chosen.values()), chosen
    slow = found.keys() - {name for names in chosen.values() for name in names}
    marks = {name: pytest.mark.slow if name in slow else () for name in found}
    return pytest.mark.parametrize("case", [pytest.param(found[name], id=name, marks=marks[name]) for name in found])


@cases(
    ["ddp unused 3", "fsdp2 accumulating 3", "megatron fp32*", "zero * 1 0.5"],
    ddp=ddp.EXACT, fsdp2=fsdp2.EXACT, megatron=megatron.EXACT, zero=zero.EXACT,
)  # fmt: skip
def test_method_none_is_the_engine_bit_for_bit(case: Case) -> None:
    assert run_forks(case.ranks, attached.differences, case) == [[]] * case.ranks


# In CI, some programs leave parameters out, and one clears gradients in vain.
@cases(
    ["ddp unused* 2", "ddp looking first 2", "fsdp2 one way of a unit ?", "fsdp2 copies acc*", "meg*3", "zero*"],
    ddp=ddp.CONSERVED, fsdp2=fsdp2.CONSERVED, megatron=megatron.CONSERVED, zero=zero.CONSERVED,
)  # fmt: skip
def test_error_feedback_keeps_all_gradients(case: Case) -> None:
    assert run_forks(case.ranks, attached.unconserved, case) == [[]] * case.ranks


@cases(
    ["ddp cleared", "fsdp2 scaled 2", "megatron*", "zero*"],
    ddp=ddp.SKIPPED, fsdp2=fsdp2.SKIPPED, megatron=megatron.SKIPPED, zero=zero.SKIPPED,
)  # fmt: skip
def test_a_skipped_step_leaves_no_trace(case: Case) -> None:
    assert run_forks(case.ranks, attached.traces, case) == [[]] * case.ranks


@cases(
    ["ddp random", "fsdp2 bf16", "megatron random*", "megatron weights*"],
    ddp=ddp.RESUMED, fsdp2=fsdp2.RESUMED, megatron=megatron.RESUMED, zero=zero.RESUMED,
)  # fmt: skip
def test_a_resumed_run_equals_an_uninterrupted_one(case: Case, tmp_path: Path) -> None:
    assert run_forks(case.ranks, attached.unlike_uninterrupted, case, str(tmp_path)) == [[]] * case.ranks


@pytest.mark.parametrize(("saving", "loading"), [ddp.OTHER_SIZES, fsdp2.OTHER_SIZES, megatron.OTHER_SIZES])
def test_sums_of_residuals_survive_another_number_of_ranks(saving: Case, loading: Case, tmp_path: Path) -> None:
    saved = run_forks(saving.ranks, attached.residuals_by_parameter, saving, str(tmp_path), True)
    loaded = run_forks(loading.ranks, attached.residuals_by_parameter, loading, str(tmp_path), False)
    sums = [{key: sum(rank[key] for rank in ranks) for key in saved[0]} for ranks in (saved, loaded)]
    assert any(sums[0].values())
    assert sums[1] == pytest.approx(sums[0], abs=1e-6)


@pytest.mark.timeout(2 * PATIENCE)
@cases(
    ["ddp int4_stochastic", "fsdp2 topk 2", "fsdp2 sign 4", "fsdp2 two levels", "megatron int8 *", "megatron nodes"],
    ddp=ddp.TRAINED, fsdp2=fsdp2.TRAINED, megatron=megatron.TRAINED,
)  # fmt: skip
def test_every_method_trains(case: Case) -> None:
    assert run_forks(case.ranks, attached.unlearned, case, timeout=PATIENCE) == [""] * case.ranks


TOLD = {"monitor": {}}
ALL_KEPT = sharded.Setting(units=(), options={"reshard_after_forward": False})


@pytest.mark.parametrize(
    ("engine", "weights", "case", "rel"),
    [
        ("DDP", "none", Branching(two_branches.Setting(), section=FOUR_BITS | TOLD), 0.1),
        ("FSDP2", "blockwise bits=8", Branching(ALL_KEPT, section=BOTH | TOLD), 0.2),
    ],
)
def test_the_first_rank_announces_what_it_sends(engine: str, weights: str, case: Case, rel: float) -> None:
    (line, [seen]), (other, _) = run_forks(2, attached.announced, case)
    assert line.startswith(f"deepspeed_compress: gradients blockwise bits=4, weights {weights}; {engine}, ")
    assert "2 data-parallel ranks; 8 of 8 parameters are compressed" in line
    figures = r"about ([\d,]+) bytes of gradients a step, uncompressed ([\d,]+) bytes"
    found = re.search(figures + r"(?:.* about ([\d,]+) bytes of weights each time they are gathered)?", line)
    assert found is not None
    sent, alone, gathered = (int((figure or "0").replace(",", "")) for figure in found.groups())
    # Small messages end with whole blocks.
    assert sent == pytest.approx(seen.bytes_sent, rel=rel)
    assert alone == seen.bytes_uncompressed
    assert gathered == pytest.approx(seen.bytes_weights, rel=rel)
    assert other == ""
    assert [text for text, _ in run_forks(2, attached.announced, replace(case, section=FOUR_BITS))] == ["", ""]


@pytest.mark.parametrize("case", [ddp.OTHER_SIZES[1], fsdp2.OTHER_SIZES[1], megatron.OTHER_SIZES[1]])
def test_keys_that_other_engines_lack_are_refused_by_name(case: Case) -> None:
    for texts in run_forks(2, attached.refusals, case):
        check_contained(attached.OTHER_KEYS, texts)
