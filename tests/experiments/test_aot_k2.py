"""K2's whole training step, compiled for 256 described H100s; figures may not grow by more than 3%."""

import json

import pytest

from experiments import aot_k2
from experiments.aot_k2 import POLICIES, Options, compile_step, configuration, host_copies
from k2jax.config import ActivationConfig
from k2jax.parallel import hlo

# A loop over ticks: one array is read from the host while a product runs, another is written there.
TICKS = """HloModule ticks, is_scheduled=true

%body (p: (f32[2,8], f32[2,8], f32[8,8])) -> (f32[2,8], f32[2,8], f32[8,8]) {
  %p = (f32[2,8]{1,0:S(5)}, f32[2,8]{1,0:S(5)}, f32[8,8]{1,0}) parameter(0)
  %a = f32[2,8]{1,0:S(5)} get-tuple-element(%p), index=0
  %b = f32[2,8]{1,0:S(5)} get-tuple-element(%p), index=1
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=2
  %read = ((f32[2,8]{1,0:S(5)}), f32[1,8]{1,0}, u32[]) fusion-start(%a), kind=kLoop, calls=%slice
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %row = f32[1,8]{1,0} fusion-done(%read)
  %z = f32[8,8]{1,0} collective-permute(%y), source_target_pairs={{0,1},{1,0}}
  LATER
  ROOT %out = (f32[2,8]{1,0:S(5)}, f32[2,8]{1,0:S(5)}, f32[8,8]{1,0}) tuple(%a, %written, %z)
}

ENTRY %main (q: (f32[2,8], f32[2,8], f32[8,8])) -> (f32[2,8], f32[2,8], f32[8,8]) {
  %q = (f32[2,8]{1,0:S(5)}, f32[2,8]{1,0:S(5)}, f32[8,8]{1,0}) parameter(0)
  ROOT %loop = (f32[2,8]{1,0:S(5)}, f32[2,8]{1,0:S(5)}, f32[8,8]{1,0}) while(%q), body=%body, KNOWN
}
""".replace("KNOWN", 'backend_config={"known_trip_count":{"n":"5"}}')
START = "%there = ((f32[2,8]{1,0:S(5)}, f32[1,8]{1,0}), f32[2,8]{1,0:S(5)}, u32[]) fusion-start(%b, %row), calls=%update"
DONE = "%written = f32[2,8]{1,0:S(5)} fusion-done(%there)"
PRODUCT = "%w = f32[8,8]{1,0} dot(%z, %z), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
AT_ONCE = "%written = f32[2,8]{1,0:S(5)} dynamic-update-slice(%b, %row)"


@pytest.mark.parametrize(
    ("lines", "beside"),
    [((START, PRODUCT, DONE), True), ((START, DONE, PRODUCT), False), ((PRODUCT, AT_ONCE), False)],
)
def test_what_runs_beside_a_copy_to_the_host(lines, beside):
    program = hlo.parse(TICKS.replace("LATER", "\n  ".join(lines)))
    assert host_copies(program) == [True, beside]


@pytest.mark.slow
def test_k2_fits_32_nodes_and_the_planner_knows_it():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="compiling for H100 needs pip install -e '.[aot]'")
    one = compile_step(Options(nodes=32, activations=ActivationConfig(policy="k2")))
    assert (one.devices, one.layers, one.optimizer) == (256, 61, "host")
    assert one.total_gb < 1.03 * 40.01
    assert one.host_arguments_gb < 1.03 * 35.29 and one.host_temp_gb < 1.03 * 54.60
    assert one.planner_gb == pytest.approx(one.total_gb, rel=0.1)
    # Every array that waits on the host is read and written once a tick, and each copy has a matrix product beside it.
    assert one.host_copies == 2 * 17 and one.host_copies_alone == 0
    over = {(c.kind, c.axes): c for c in one.collectives}
    assert over["all-to-all", "expert"].synchronous == over["collective-permute", "pipeline"].synchronous == 0


def test_a_table_goes_on_where_it_ended(tmp_path, monkeypatch):
    file, asked = tmp_path / "table.jsonl", []

    def compiled(options):
        asked.append(options.activations)
        sizes = dict.fromkeys(aot_k2.Compiled._fields, 1.0)
        return aot_k2.Compiled(**sizes | {"target": "h100", "devices": 256, "layers": 61})

    monkeypatch.setattr(aot_k2, "compile_step", compiled)
    monkeypatch.setattr(aot_k2, "POLICIES", POLICIES[:2])
    assert len(aot_k2.table(Options(table=file))) == len(asked) == 2
    monkeypatch.setattr(aot_k2, "POLICIES", POLICIES[:3])
    lines = aot_k2.table(Options(table=file))
    assert asked == [ActivationConfig(policy="full", input=action) for action in (None, "fp8", "offload")]
    assert [line["policy"] for line in lines] == [*POLICIES[:3]]
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    with pytest.raises(ValueError, match=r"'devices': 256.*'devices': 512"):
        aot_k2.table(Options(table=file, nodes=64))


def test_where_the_optimizer_lies():
    assert configuration(Options(nodes=32))[0].mesh.offload
    assert not configuration(Options(nodes=64))[0].mesh.offload
    assert not configuration(Options(nodes=32, optimizer="device"))[0].mesh.offload
    assert not configuration(Options(nodes=32, target="v5p"))[0].mesh.offload  # 95 GB


@pytest.mark.parametrize(
    ("options", "said"),
    [({"nodes": 40}, "next to it are 256 and 512"), ({"nodes": 0}, "--nodes"), ({"layers": 0}, "--layers")],
)
def test_a_cluster_that_does_not_fit_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        configuration(Options(**options))
