import numpy as np

from experiments import _figures


def test_smoothing_is_a_mean_of_what_came_before():
    assert _figures.smooth(np.array([1.0, 3.0, 5.0, np.nan, 9.0]), 2).tolist() == [1.0, 2.0, 4.0, 5.0, 9.0]
    assert np.isnan(_figures.smooth(np.array([np.nan, 1.0]), 5)[0])
    assert _figures.smooth(np.arange(3.0), 9).tolist() == [0.0, 0.5, 1.0]


def test_a_figure_that_stands_is_whole(tmp_path):
    figure, axes = _figures.panels(1, 2, "title")
    _figures.dress(axes[0, 0], "left", "step", "loss (nats)")
    _figures.legend(axes[0, 0], "best")
    assert axes[0, 0].get_legend() is None  # of nothing
    axes[0, 1].plot([1, 2], label="a curve")
    _figures.legend(axes[0, 1], "best")
    assert [text.get_text() for text in axes[0, 1].get_legend().get_texts()] == ["a curve"]
    _figures.save(figure, tmp_path / "new" / "figure.png")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["figure.png"]
