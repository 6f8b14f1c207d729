"""Labels of points in a picture: every point has a readable name."""

import itertools

from deepspeed_compress.tools.plots import Label, label_points, new_figure

CLOSE = ["blockwise4-weights4", "topk10-values4", "powersgd4", "sign", "file"]


def test_names_of_neighbours_do_not_cover_each_other() -> None:
    figure = new_figure(11, 5.2)
    [axes] = [figure.subplots(1, 1)]
    labels = [Label(name, 0.8 + n / 100, 0.01 * n) for n, name in enumerate(CLOSE)]
    labels += [Label("none", 1.0, 0.0), Label("far", 3.0, 30.0)]
    for label in labels:
        axes.scatter(label.x, label.y)
    axes.margins(x=0.18)
    figure.draw_without_rendering()
    label_points(axes, labels)
    figure.draw_without_rendering()
    assert {text.get_text() for text in axes.texts} == {label.text for label in labels}
    # Ignore the thin line that leads to the point.
    boxes = [super(type(text), text).get_window_extent() for text in axes.texts]
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
