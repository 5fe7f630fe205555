import numpy as np
import pytest

from k2jax.train.diagnostics import diagnose, find_spikes


def decaying(n=1000, seed=0, noise=0.04):
    steps = np.arange(n)
    losses = 2.5 + 6.0 * np.exp(-steps / 60) + 2 * (steps + 1.0) ** -0.3
    return losses + noise * np.random.default_rng(seed).normal(size=n)


@pytest.mark.parametrize("seed", range(20))
def test_silent_on_clean_decaying_noise(seed):
    assert find_spikes(decaying(seed=seed).tolist()) == []


def test_silent_on_flat_noise_and_on_a_curve_without_noise():
    assert find_spikes((3 + 0.1 * np.random.default_rng(0).normal(size=5000)).tolist()) == []
    assert find_spikes([2.0] * 300) == [] and find_spikes(decaying(noise=0).tolist()) == []


@pytest.mark.parametrize("at", [20, 150, 700, 999])
def test_flags_an_injected_spike_at_its_step(at):
    losses = decaying()
    losses[at] += 0.6 if at > 100 else 1.2  # early on the fall itself hides more
    (spike,) = find_spikes(losses.tolist())
    assert (spike.start, spike.end) == (at + 1, at + 1) and spike.z > 7
    assert spike.peak == losses[at]


def test_a_stretch_is_one_spike_and_a_divergence_does_not_become_the_norm():
    losses = decaying()
    losses[400:430] += np.linspace(1.5, 0.6, 30)
    losses[900:] += 3
    assert [(s.start, s.end) for s in find_spikes(losses.tolist())] == [(401, 430), (901, 1000)]


def test_a_loss_that_is_not_finite_is_a_spike():
    losses = [*decaying()[:50].tolist(), None, float("nan"), *decaying()[52:100].tolist()]
    (spike,) = find_spikes(losses)
    assert spike == (51, 52, None, None)


def healthy(n=100):
    row = {
        "skips_total": 0,
        "seconds": 1.0,
        "data_wait": 0.01,
        "load_imbalance": {"moe": [1.3, 1.2]},
        "idle_experts": {"moe": [0, 0]},
        "max_logit": {"moe": [0.01, 0.02]},
    }
    return [row | {"step": i + 1, "loss": float(x)} for i, x in enumerate(decaying(n))]


def test_a_healthy_run_has_no_warnings(small):
    assert diagnose(small, healthy()) == [] and diagnose(small, []) == []


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ({"data_wait": 0.2}, "waited for data 20%"),
        ({"load_imbalance": {"moe": [1.1, 6.0]}}, "layer 1 of moe is unbalanced"),
        ({"idle_experts": {"moe": [3, 0]}}, "layer 0 of moe has 3 expert"),
        ({"max_logit": {"moe": [0.01, 130.0]}}, "130 against optim.qk_tau=0.03"),
        ({"skips_total": 2}, "2 step(s) had a gradient"),
        ({"loss": 30.0}, "the loss spiked 1 time(s), first at step 96"),
    ],
)
def test_each_probe_fires_on_its_fault(small, fault, word):
    rows = healthy()
    faulty = rows if "data_wait" in fault else rows[-5:]
    for row in faulty if "idle_experts" not in fault and "load_imbalance" not in fault else rows[-10:]:
        row.update(fault)
    (sentence,) = diagnose(small, rows)
    assert word in sentence
