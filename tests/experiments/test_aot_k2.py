"""K2's whole training step, compiled for 256 described H100s; figures may not grow by more than 3%."""

import pytest

from experiments.aot_k2 import Options, compile_step, configuration
from k2jax.config import ActivationConfig


@pytest.mark.slow
def test_k2_fits_32_nodes_and_the_planner_knows_it():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for H100 needs pip install -e '.[aot]'")
    one = compile_step(Options(nodes=32, activations=ActivationConfig(policy="k2")))
    assert (one.devices, one.layers, one.optimizer) == (256, 61, "host")
    assert one.total_gb < 1.03 * 39.55
    assert one.host_arguments_gb < 1.03 * 35.29 and one.host_temp_gb < 1.03 * 54.60
    assert one.planner_gb == pytest.approx(one.total_gb, rel=0.1)
    over = {(c.kind, c.axes): c for c in one.collectives}
    # With the rows stored, the last 64 ticks, which have no forward unit, begin with an exchange that nothing runs beside.
    assert over["all-to-all", "expert"].synchronous <= 64 and over["collective-permute", "pipeline"].synchronous == 0


def test_where_the_optimizer_lies():
    assert configuration(Options(nodes=32))[0].mesh.offload
    assert not configuration(Options(nodes=64))[0].mesh.offload
    assert not configuration(Options(nodes=32, optimizer="device"))[0].mesh.offload


@pytest.mark.parametrize(
    ("options", "said"),
    [({"nodes": 40}, "next to it are 256 and 512"), ({"nodes": 0}, "--nodes"), ({"layers": 0}, "--layers")],
)
def test_a_cluster_that_does_not_fit_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        configuration(Options(**options))
