import numpy as np
from PIL import Image

from k2jax.scaling.laws import Difference, common_loss, fit_laws, flops_ratios
from k2jax.scaling.plots import Panel, Rule, caption, plot_rules, plot_sparsity, separation

SPARSITIES = (8, 48)


def panel(ratios=True):
    flops = np.tile(np.array([1e12, 2e12, 4e12, 8e12]), (2, 1))
    loss = 1.0 + np.array([[2.2], [2.0]]) * (flops / 1e12) ** -0.2
    fit = fit_laws(SPARSITIES, flops, loss, floor=1.0, resamples=20)
    at_loss = common_loss(fit)
    return Panel("router left out", "training FLOPs", flops, loss, fit, at_loss, flops_ratios(fit, 48, at_loss))


def test_figure_is_a_whole_png_and_fitted_lines_change_it(tmp_path):
    fitted, bare = panel(), panel()._replace(fit=None, ratios={}, at_loss=None)
    sizes = {}
    for name, p in (("fitted", fitted), ("bare", bare)):
        path = tmp_path / "new" / f"{name}.png"
        plot_sparsity(path, "title", SPARSITIES, [p, p], [Difference(8, 48, 0.1, 0.01, 4)], {8: 1.69})
        image = np.asarray(Image.open(path).convert("L"))
        sizes[name] = (image < 128).sum()
        assert image.shape[1] > 1000
    assert sizes["fitted"] > 1.05 * sizes["bare"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["bare.png", "fitted.png"]


def test_caption_sets_our_ratios_beside_the_reports():
    text = caption([panel()], [], {8: 1.69})
    assert "8: 1.61 [1.61, 1.61]" in text  # (2.2 / 2.0) ** (1 / 0.2)
    assert "8: 1.69" in text


def test_separation_names_what_is_and_what_is_not():
    text = separation([Difference(8, 16, 0.05, 0.01, 8), Difference(16, 32, 0.01, 0.01, 8), Difference(32, 48, -0.1, 0.01, 8)])
    assert "separated at 5%: 8 > 16, 32 < 48." in text
    assert "Not separated: 16 and 32." in text
    assert "Nothing measures the error between 8 and 16" in separation([Difference(8, 16, 0.05, float("nan"), 0)])


def test_figure_of_rules_has_both_curves_and_every_rate(tmp_path):
    colours = (("adamw", "C0"), ("muon", "C3"))
    names, flops = ("adamw", "muon"), np.tile(np.array([1e11, 2e11, 4e11]), (2, 1))
    loss = np.array([[3.5], [3.3]]) * (flops / 1e11) ** -0.1
    fit = fit_laws(names, flops, loss, resamples=20)
    grids = [{c: {5e-3: x + 0.2, 1e-2: x} for c, x in zip(*row, strict=True)} for row in zip(flops, loss, strict=True)]
    rules = [Rule(name, name, colour, flops[i], loss[i], grids[i]) for i, (name, colour) in enumerate(colours)]
    sizes = {}
    for name, given in (("fitted", fit), ("bare", None)):
        path = tmp_path / f"{name}.png"
        at_loss = common_loss(fit) if given else None
        plot_rules(path, "title", rules, given, at_loss, [(0.8, 0.9), (0.7, 0.8)], "a note")
        sizes[name] = (np.asarray(Image.open(path).convert("L")) < 128).sum()
    assert sizes["fitted"] > sizes["bare"]
