"""The picture: every candidate has a point and a readable name."""

import itertools

from deepspeed_compress.tools.tune.search import Outcome
from deepspeed_compress.tools.tune.summary import Objective, _figure, summarise
from tests.tools.tune.results import a_round, candidates, result

CLOSE = ["blockwise4-weights4", "topk10-values4", "powersgd4", "sign", "file"]


def test_names_of_neighbours_do_not_cover_each_other() -> None:
    tried = [result(name, 0.0001 * n, 80 + n, 100 + n) for n, name in enumerate(CLOSE)]
    far = result("far", 0.3, 300, 10_000)
    outcome = Outcome((a_round(*tried, far),))
    summary = summarise(outcome, candidates(*CLOSE, "far"), [], Objective(0.005, "step_time"))
    figure = _figure(summary.rows, summary)
    figure.draw_without_rendering()
    for axes in figure.axes:
        assert {text.get_text() for text in axes.texts} == {"none", "far", *CLOSE}
        # Ignore the thin line that leads to the point.
        boxes = [super(type(text), text).get_window_extent() for text in axes.texts]
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_nothing_measured_makes_no_points() -> None:
    summary = summarise(Outcome(()), candidates("a"), [], Objective(0.005, "step_time"))
    assert [len(axes.texts) for axes in _figure([], summary).axes] == [0, 0]
