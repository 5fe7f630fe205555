import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from k2jax.model.tensor_files import create, read_header


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((2, 3, 4)).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal(7).astype(ml_dtypes.float8_e4m3fn),
    }


def written(path, arrays):
    with create(path, {name: (x.shape, x.dtype) for name, x in arrays.items()}) as places:
        for name, x in arrays.items():
            places[name].map("r+")[...] = x


def test_reads_what_the_library_writes(tmp_path, arrays):
    plain = {"a.weight": arrays["a.weight"], "n": np.arange(4, dtype=np.int32)}
    safetensors.numpy.save_file(plain, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert found.keys() == plain.keys()
    for name, x in plain.items():
        np.testing.assert_array_equal(found[name].map(), x)


def test_the_library_reads_what_is_written(tmp_path, arrays):
    written(tmp_path / "x.safetensors", arrays)
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert set(file.keys()) == set(arrays)
        np.testing.assert_array_equal(file.get_tensor("a.weight"), arrays["a.weight"])
        assert file.get_slice("b").get_shape() == [2, 3, 4] and file.get_slice("b").get_dtype() == "BF16"
    found = read_header(tmp_path / "x.safetensors")
    for name, x in arrays.items():
        assert found[name].dtype == x.dtype and found[name].map().tobytes() == x.tobytes()


def test_a_file_appears_only_when_whole(tmp_path, arrays):
    with pytest.raises(RuntimeError), create(tmp_path / "x", {"a": ((2,), np.dtype(np.float32))}) as places:
        places["a"].map("r+")[...] = 1
        raise RuntimeError
    assert not (tmp_path / "x").exists()
    written(tmp_path / "x", arrays)  # over what is left of the first attempt
    assert (tmp_path / "x").exists()


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path, arrays):
    written(tmp_path / "x", arrays)
    whole = (tmp_path / "x").read_bytes()
    for length in (0, 5, 40, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut is cut short"):
            read_header(tmp_path / "cut")


def test_headers_that_contradict_themselves_are_refused(tmp_path):
    def file(**entry):
        header = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}).encode()
        (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    file()
    read_header(tmp_path / "x")
    file(shape=[3])
    with pytest.raises(ValueError, match=r"t in .* has 8 bytes; its shape \(3,\) takes 12"):
        read_header(tmp_path / "x")
    file(dtype="F8_E5M2")
    with pytest.raises(ValueError, match=r"t in .* is F8_E5M2"):
        read_header(tmp_path / "x")
    (tmp_path / "x").write_bytes((3).to_bytes(8, "little") + b"abc")
    with pytest.raises(ValueError, match="not JSON"):
        read_header(tmp_path / "x")
