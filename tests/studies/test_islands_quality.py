"""Test the table of the study of rare exchanges."""

from rich.table import Table

from launch.studies.islands_quality import SYNCHRONOUS, table, variants
from launch.studies.loss_curve import Curve

RARE = "30 nesterov of 0.5, 4 bits, muon"
SECTIONS = variants(1000)


def cells(shown: Table) -> list[list[str]]:
    return [list(map(str, column.cells)) for column in shown.columns]


def curve(*held_out: tuple[float, float]) -> Curve:
    return Curve(0, (), held_out)


def test_islands_are_compared_after_their_last_exchange() -> None:
    curves = {
        (f"{SYNCHRONOUS}, muon", 0): curve((960, 4.2), (990, 4.0), (1000, 3.9)),
        (SYNCHRONOUS, 0): curve((960, 1.0), (990, 1.0), (1000, 1.0)),
        (RARE, 0): curve((960, 4.4), (990, 4.1), (1000, 4.6)),
        (RARE, 1): curve((960, 4.4), (990, 4.3), (1000, 4.6)),
    }
    names, seeds, steps, losses, ratios = cells(table(curves, SECTIONS))
    assert names == [f"{SYNCHRONOUS}, muon", SYNCHRONOUS, RARE]
    assert seeds == ["1", "1", "2"]
    assert steps == ["1,000", "1,000", "990"]
    assert losses == ["3.9000", "1.0000", "4.2000"]
    assert ratios == ["+0.00 %", "+0.00 %", "+2.50 %"], "only seed 0 has a synchronous run"


def test_islands_are_compared_at_the_same_learning_rate() -> None:
    rates = ("", ", twice the rate")
    curves = {(f"{SYNCHRONOUS}{rate}", 0): curve((990, loss)) for rate, loss in zip(rates, (4.0, 3.0), strict=True)}
    curves |= {(f"30 average, 4 bits{rate}", 0): curve((990, 3.3)) for rate in rates}
    *_, ratios = cells(table(curves, SECTIONS))
    assert ratios == ["+0.00 %", "+0.00 %", "-17.50 %", "+10.00 %"]
