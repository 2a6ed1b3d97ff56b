"""Handles, preparations and facts about kernels of fa_attention.capi. Kernels are compiled for an architecture, without a GPU."""

import pytest
from conftest import refused

import fa_attention
from fa_attention import capi

np = pytest.importorskip("numpy")
HOST = (capi.DEVICE_HOST, 0)
SIZES = (2, 4, 2, 5, 7)


@pytest.fixture(scope="module")
def library():
    return fa_attention.load()


def compiled(find):
    """What `find` returns, where there is an NVRTC."""
    try:
        return find()
    except fa_attention.NoCompiler as error:
        pytest.skip(str(error))


def test_preparations_on_the_host(library):
    """There is nothing to compile, and arguments are checked all the same."""
    attention = capi.Attention(library, 16, "float32", device=HOST)
    attention.prepare(*SIZES)
    attention.prepare_backward(*SIZES, without=("dq",))
    attention.prepare_append(capi.append_shape(rotary_dims=8, table_dtype="float32"))
    attention.prepare_merge(capi.merge_shape(states_dtype="float32"))
    assert attention.cache_counters().compiles == 0
    refused(ValueError, lambda: attention.prepare(2, 3, 2, 5, 7), "h_q")
    refused(ValueError, lambda: attention.prepare_append(capi.append_shape(rotary_dims=24)), "24")
    refused(ValueError, lambda: attention.prepare_merge(capi.merge_shape(states_dtype="int32")), "states = i32")
    refused(TypeError, lambda: capi.merge_shape(result_dtype="complex64"), "result_dtype")


def test_numbers_beyond_their_fields(library):
    """They are refused, not cut to what fits."""
    for name in ("head_dim_v", "value_in_key", "group_size", "top_keys"):
        refused(ValueError, lambda name=name: capi.make_config(16, "float32", **{name: 2**32 + 16}), name)
    refused(ValueError, lambda: capi.Attention(library, 2**32 + 16, "float32", device=HOST), "head_dim")
    refused(ValueError, lambda: capi.append_shape(rotary_dims=2**32 + 8), "rotary_dims")


def test_kernels_of_merges_and_appends(library, tmp_path):
    more = {"cache_directory": str(tmp_path), "tune": "off"}
    shape = capi.merge_shape(states_dtype="float32")
    merge = compiled(lambda: capi.find_merge_kernel(library, "sm_90a", shape, 64, "bfloat16", **more))
    assert b"merge" in merge.name and merge.registers > 0 and merge.compile_ms > 0
    rotary = capi.append_shape(rotary_dims=64)
    append = compiled(lambda: capi.find_append_kernel(library, "sm_90a", rotary, 64, "bfloat16", **more))
    assert b"append" in append.name and append.spec != merge.spec
    again = capi.find_merge_kernel(library, "sm_90a", shape, 64, "bfloat16", compile="never", **more)
    assert again.origin == b"disk"
    more["compile"] = "never"
    mixed = capi.merge_shape(mixed=True)
    refused(fa_attention.Error, lambda: capi.find_merge_kernel(library, "sm_90a", mixed, 64, "bfloat16", **more),
            "no stored kernel for merge_states")


def test_debug_kernels(library, tmp_path):
    more = {"cache_directory": str(tmp_path), "tune": "off", "kernel": "tile_m=64"}
    debug, plain = (compiled(lambda debug=debug: capi.find_kernel(library, "sm_80", (1, 1, 1, 64, 64), 64, "float16", debug=debug,
                                                                  **more)) for debug in (True, False))
    assert b"debug=1" in debug.spec and b"debug" not in plain.spec
    assert b"tile_m=64" in plain.spec


def test_kernels_by_name(library, tmp_path):
    more = {"cache_directory": str(tmp_path), "tune": "off"}
    sizes = (1, 2, 2, 256, 256)
    for family, text, expected in (("sm80_fp8", "tile_m=64", b"sm80_fp8_forward"), ("automatic", "", b"sm90_fp8_forward")):
        found = compiled(lambda family=family, text=text: capi.find_kernel(library, "sm_90a", sizes, 64, "float8_e4m3fn", family=family,
                                                                           kernel=text, **more))
        assert found.spec.startswith(expected), found.spec
    refused(fa_attention.InvalidArgument, lambda: capi.find_kernel(library, "sm_90a", sizes, 64, "float16", family="sm70", **more),
            "sm70")


def test_compiled_behind_calls(library):
    q = np.ones((1, 1, 8, 64), np.float16)
    o = np.empty_like(q)
    capi.Attention(library, 64, "float16", device=HOST, compile="background").bind_forward(q, q, q, o)()
    assert (o == 1).all()


def test_options_of_the_host(library):
    q = np.random.default_rng(0).standard_normal((1, 1, 40, 64)).astype(np.float16)
    results = []
    for host_f64 in (False, True):
        o = np.empty_like(q)
        capi.Attention(library, 64, "float16", device=HOST, host_f64=host_f64, debug=True).bind_forward(q, q, q, o)()
        results.append(o.astype(np.float64))
    scores = np.einsum("hqd,hkd->hqk", q[0].astype(np.float64), q[0].astype(np.float64)) / 8
    p = np.exp(scores - scores.max(-1, keepdims=True))
    right = (p / p.sum(-1, keepdims=True)) @ q[0].astype(np.float64)
    errors = [np.abs(o[0] - right).max() for o in results]
    assert errors[1] <= 2**-11 * np.abs(right).max() + 1e-12 and errors[0] <= 2 * errors[1]
    for name, accepted in (("cache_mode", "disk, memory"), ("compile", "allow, never, background")):
        refused(ValueError, lambda name=name: capi.make_config(64, "float16", **{name: "x"}), f"{name} is x", accepted)
