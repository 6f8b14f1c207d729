"""The row of Muon: what it costs, what it gains, and the file that it writes."""

from dataclasses import replace

import pytest

from deepspeed_compress.config import parse_section
from deepspeed_compress.planner.choices import Choice, Setup, choices, others
from deepspeed_compress.planner.files import ds_config
from deepspeed_compress.planner.search import MUON_STEPS, Job, search
from tests.planner.jobs import LLAMA_1B, job, layout


def muon_of(plan: Job, zero: int) -> Choice | None:
    found = search(plan)
    now = choices(plan, found, Setup(zero))[0]
    return next((one for one in others(plan, found, now) if one.candidate.layout.optimizer == "Muon"), None)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_muon_takes_half_of_the_steps_and_its_products(zero: int) -> None:
    plan = job("16xA100", "10gbit", LLAMA_1B, batch=256, seq=2048, tokens=20e9)
    row = muon_of(plan, zero)
    assert row is not None
    alike = plan.candidate(replace(row.candidate.layout, optimizer="AdamW"))
    longer = row.seconds / alike.prediction.seconds
    assert 1 < longer < 1.1
    assert row.candidate.days == pytest.approx(MUON_STEPS * longer * alike.days)
    assert row.loss == "as now, in 54% of the steps"


def test_products_of_muon_are_those_of_its_paper() -> None:
    """X X', its square, and that times X, for X of m rows and n > m columns: 4 m^2 n + 2 m^3 operations."""
    plan = job("16xA100", "10gbit", batch=256)
    terms = plan.predict(layout(data=16, zero=1, optimizer="Muon")).terms
    seconds = next(term.seconds for term in terms if term.name == "Muon")
    operations = sum(4 * min(size) ** 2 * max(size) + 2 * min(size) ** 3 for size in plan.model.adapted)
    rate = plan.cluster.gpu.matmul_rate(plan.constants)
    assert seconds == pytest.approx(5 * operations * plan.model.layers / 16 / rate, rel=0.05)


def test_zero_3_and_adapters_have_no_row_of_muon() -> None:
    plan = job("16xA100", "10gbit", LLAMA_1B, batch=256, seq=2048)
    assert muon_of(plan, 3) is None
    assert muon_of(replace(plan, model=replace(LLAMA_1B, rank=16)), 1) is None


def test_the_file_of_the_row_is_accepted() -> None:
    plan = job("16xA100", "10gbit", LLAMA_1B, batch=256, seq=2048)
    row = muon_of(plan, 1)
    assert row is not None
    written = ds_config(row.candidate.layout, plan.cluster)
    assert (written["optimizer"]["type"], written["gradient_clipping"]) == ("Muon", 0.0)
    parse_section(written)
