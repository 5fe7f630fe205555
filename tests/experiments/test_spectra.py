"""The notebook's pictures: their gradients, and that what they show is what they say."""

import math

import numpy as np
import pytest

from experiments import _spectra
from experiments._spectra import D_MODEL, adamw, draw_rms, draw_spectrum, gradients, momentum, rms_of_update
from k2jax.kernels.newton_schulz import SETS
from k2jax.optim.probes import svd_entropy


def values(x):
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


def test_gradients_have_the_condition_asked_for():
    flat, steep = (values(gradients(condition).mean(0)) for condition in (1.0, 1e4))
    assert flat[0] / flat[-1] < 3  # noise alone
    assert 3e3 < steep[0] / steep[-1] < 3e4
    with pytest.raises(ValueError, match=r"the condition of a spectrum is at least 1; got 0\.5"):
        gradients(0.5)


def test_both_optimizers_see_all_gradients():
    grads_tNM = np.asarray(gradients(1e3), np.float64)
    mu, b1, b2 = 0.95, 0.9, 0.95
    powers = np.arange(len(grads_tNM))[::-1, None, None]
    np.testing.assert_allclose(momentum(gradients(1e3)), (mu**powers * grads_tNM).sum(0), rtol=1e-4, atol=1e-7)
    first = (b1**powers * grads_tNM).sum(0) * (1 - b1) / (1 - b1 ** len(grads_tNM))
    second = (b2**powers * grads_tNM**2).sum(0) * (1 - b2) / (1 - b2 ** len(grads_tNM))
    np.testing.assert_allclose(adamw(gradients(1e3)), first / (np.sqrt(second) + 1e-8), rtol=1e-3, atol=1e-4)


def test_the_spectrums_curves():
    condition = 1e4
    left, right = draw_spectrum("jordan", 5, condition).axes
    legend = [text.get_text() for text in left.get_legend().get_texts()]
    assert [text.split(":")[0] for text in legend] == ["momentum", "AdamW's update", "Muon's update, jordan"]
    of_momentum, of_adamw, of_muon = (float(text.rsplit(" ", 1)[1]) for text in legend)
    assert of_muon > of_adamw and of_muon > of_momentum
    assert of_momentum == pytest.approx(float(svd_entropy(momentum(gradients(condition)))), abs=1e-3)
    assert [line.get_label() for line in right.lines] == [name for name in SETS if name != "eight_two"]
    shares, became = right.lines[0].get_xydata().T
    np.testing.assert_allclose(np.square(shares).sum(), 1, rtol=1e-6)
    assert (became[shares > 0.01] > 0.6).all() and (became[shares > 0.01] < 1.2).all()  # [0.682, 1.134] but for bfloat16


def test_a_set_that_needs_more_steps_says_so():
    left, right = draw_spectrum("eight_two", 5, 1e3).axes
    assert [text.get_text() for text in right.texts] == ["Newton-Schulz coefficients 'eight_two' need at least 10 steps; got 5"]
    assert len(left.lines) == 2
    left, right = draw_spectrum("eight_two", 10, 1e3).axes
    assert not right.texts and len(left.lines) == 3 and len(right.lines) == len(SETS)


def test_rms_is_matched_whatever_the_shape():
    for rows, columns in ((16, 16), (16, 64), (96, 32)):
        raw, adjusted, baseline = rms_of_update(rows, columns)
        assert 0.14 < adjusted < 0.23, (rows, columns)  # 0.2 times the RMS of singular values in [0.68, 1.13]
        assert adjusted == pytest.approx(raw * 0.2 * math.sqrt(max(rows, columns)))
        assert baseline == pytest.approx(raw * 0.2 * math.sqrt(D_MODEL))


def test_the_rms_picture_has_a_curve_for_each(monkeypatch):
    monkeypatch.setattr(_spectra, "COLUMNS", (16, 64))
    (ax,) = draw_rms(16).axes
    raw, adjusted, baseline = (line.get_ydata() for line in ax.lines)
    assert raw[0] > raw[1] and baseline[0] == pytest.approx(adjusted[0] * 2, rel=1e-6)
    assert tuple(y[1] for y in (raw, adjusted, baseline)) == pytest.approx(rms_of_update(16, 64))
