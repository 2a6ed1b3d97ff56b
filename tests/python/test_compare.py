"""What tools/compare.py --decode and --mla measure and write, without the measuring."""

import argparse
import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import compare_decode_rows as decode_rows  # noqa: E402
import compare_mla_rows as mla_rows  # noqa: E402


def parse(*arguments):
    parser = argparse.ArgumentParser()
    decode_rows.add_options(parser)
    mla_rows.add_options(parser)
    return parser.parse_args(arguments)


def names(*arguments):
    args = parse(*arguments)
    return [row.name() for row in decode_rows.selected(decode_rows.all_rows(args.page_sizes), args)]


def test_every_row_is_there_once_in_every_page_size():
    rows = decode_rows.all_rows()
    problems = [json.dumps(row.problem(), sort_keys=True) for row in rows]
    assert len(set(problems)) == len(problems)
    of_size = {size: [row for row in rows if row.page_size == size] for size in decode_rows.PAGE_SIZES}
    assert len(of_size[0]) == len(of_size[16]) == len(of_size[64])
    assert [row.group for row in of_size[0]].count("table") == 10
    grid = {(row.b, row.s_kv) for row in of_size[16]
            if (row.h_q, row.h_kv, row.d, row.s_q, row.variant) == (32, 8, 128, 1, "")}
    wanted = {(b, s) for b in (1, 4, 16, 64, 256) for s in (1024, 8192, 32768, 131072) if b * s * 4096 <= 24e9}
    assert wanted <= grid and (256, 32768) not in grid and (64, 32768) in grid
    heads = {(row.h_q, row.h_kv, row.d) for row in of_size[64]}
    assert {(64, 8, 128), (32, 32, 128), (16, 1, 128), (32, 8, 64), (32, 8, 256), (16, 8, 256)} <= heads
    assert all(row.kv_bytes() <= 24e9 for row in rows)


def test_requests_differ_where_the_variant_says_so():
    rows = {row.variant: row for row in decode_rows.all_rows([0]) if row.variant}
    ragged = rows["ragged=log-uniform:16:32768"]
    assert ragged.b == 128 and min(ragged.keys) >= 16 and max(ragged.keys) <= 32768
    assert 300 < sorted(ragged.keys)[64] < 1700  # the median of the law is 724
    one_long = rows["ragged=131072,512*127"]
    assert one_long.keys.count(512) == 127 and one_long.s_kv == 131072 and one_long.b == 128
    mixed = rows["mixed=2*2048+128*1"]
    assert mixed.rows == (2048, 2048) + (1,) * 128 and set(mixed.keys) == {2048} and mixed.causal
    assert ragged.contiguous and not ragged.packed and mixed.packed and not decode_rows.even("x", 3, 40).packed
    longest = next(row for row in decode_rows.all_rows([0]) if row.variant == "ragged=131072,512*127")
    assert longest.packed and not longest.contiguous  # of which a cache would take 69 GB
    paged = [row for row in decode_rows.all_rows([16]) if row.variant]
    assert [row.packed for row in paged] == [False, False, True]  # queries alone are packed over pages


def test_elements_are_those_that_lie_in_memory():
    rows = {row.variant: row for row in decode_rows.all_rows([0]) if row.variant}
    ragged = rows["ragged=log-uniform:16:32768"]
    assert ragged.elements() == 128 * max(ragged.keys) * 8 * 128 > decode_rows.FA3_ELEMENTS
    assert decode_rows.even("x", 3, 40).elements() == 3 * 40 * 8 * 128
    assert decode_rows.even("x", 3, 40, page_size=16).elements() == 3 * 48 * 8 * 128


def test_bytes_are_those_of_k_v_q_and_o():
    row = decode_rows.Spec("x", (1, 4), (100, 33), h_q=6, h_kv=2, d=64, page_size=16)
    assert row.kv_bytes() == 2 * 133 * 2 * 64 * 2
    assert row.bytes() == row.kv_bytes() + 2 * 5 * 6 * 64 * 2
    assert row.pages() == 7 + 3


def test_rows_are_selected():
    assert len(names()) == len(decode_rows.all_rows())
    quick = names("--quick")
    assert 20 <= len(quick) <= 26 and not any("page=64" in name for name in quick)
    assert names("--rows", "grid b=4 .*s_kv=1024 .*page=0$") == ["grid b=4 h=32/8 s_q=1 s_kv=1024 d=128 page=0"]
    either = names("--rows", "ragged", "--rows", "mixed", "--page-sizes", "0")
    assert [name.split()[0] for name in either] == ["ragged", "ragged", "mixed"]
    assert names("--rows", "no such row") == []


@pytest.mark.parametrize("wrong", [["--rows", "("], ["--page-sizes", "-1"], ["--page-sizes", "a"], ["--peers", "fa4"]])
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as refused:
        parse(*wrong)
    assert refused.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_an_entry_has_rates_and_times():
    row = decode_rows.even("table", 8, 8192, page_size=16)
    entry = decode_rows.entry(row, {"fa": 100.0, "fa3": 80.0}, cold=True)
    assert entry["us"] == {"fa": 100.0, "fa3": 80.0}
    assert entry["tbps"]["fa"] == pytest.approx(row.bytes() / 100e-6 / 1e12, abs=1e-3)
    assert {key: entry[key] for key in ("b", "h_q", "h_kv", "s_q", "s_kv", "d_qk", "d_v", "dtype", "page_size", "variant")} == {
        "b": 8, "h_q": 32, "h_kv": 8, "s_q": 1, "s_kv": 8192, "d_qk": 128, "d_v": 128, "dtype": "bf16", "page_size": 16,
        "variant": "cold"}
    lines = []
    decode_rows.print_entry(entry, lines.append)
    assert "of the best 0.80" in lines[0] and lines[0].endswith("cold")
    assert decode_rows.summary([entry]) == pytest.approx(0.8, abs=1e-2)
    alone = decode_rows.entry(row, {"fa": 100.0})
    decode_rows.print_entry(alone, lines.append)
    assert decode_rows.summary([alone]) is None and "best" not in lines[1]


def test_decodes_are_a_part_of_their_own():
    row, other = decode_rows.even("table", 8, 8192), decode_rows.even("table", 1, 8192)
    first = decode_rows.merged({}, [decode_rows.entry(row, {"fa": 9.0})], "one", {"copy_tbps": 3.0}, {"read_tbps": 3.2})
    assert first["copy_tbps"] == 3.0 and first["attention"] == [] and first["templates"] == "one"
    attention = {**first, "attention": [{"s_q": 1}], "templates": "old"}
    second = decode_rows.merged(attention, [decode_rows.entry(other, {"fa": 5.0}), decode_rows.entry(row, {"fa": 8.0})],
                                "one", {"copy_tbps": 4.0}, {"read_tbps": 3.3})
    assert second["attention"] == [{"s_q": 1}] and second["templates"] == "old" and second["copy_tbps"] == 3.0
    assert [entry["us"]["fa"] for entry in second["decode"]] == [5.0, 8.0] and second["read_tbps"] == 3.3
    third = decode_rows.merged(second, [decode_rows.entry(other, {"fa": 4.0})], "two", {}, {})
    assert len(third["decode"]) == 1 and third["decode_templates"] == "two"
    assert set(decode_rows.DECODE_KEYS) >= {"decode", "decode_templates"}


def test_conditions_are_least_median_and_greatest():
    samples = "1980, 2619, 512.50, 700.00, 45\n1755, 2619, 699.00, 700.00, 61\n1830, 2619, 650.00, 700.00, 58\n1830, 26"
    seen = decode_rows.conditions(samples)
    assert seen["sm_mhz"] == [1755, 1830, 1980] and seen["power_w"] == [512.5, 650, 699]
    assert decode_rows.conditions("1980, 2619, [N/A], 700.00, 45\n") == {
        "sm_mhz": [1980, 1980, 1980], "memory_mhz": [2619, 2619, 2619], "power_limit_w": [700, 700, 700],
        "temperature_c": [45, 45, 45]}
    assert decode_rows.conditions("") == {}


def test_templates_that_differ_are_named():
    assert decode_rows.warnings("a", "a", {"templates": "a", "decode_templates": "a"}) == []
    assert decode_rows.warnings("a", "", {}) == []
    texts = decode_rows.warnings("a", "b", {"templates": "c", "decode_templates": "a"})
    assert len(texts) == 2 and "tree b" in texts[0] and "attention" in texts[1]


def test_latent_rows_are_there_once():
    rows = mla_rows.all_rows()
    assert len({row.name() for row in rows}) == len(rows) == 24
    of_64 = {(row.h_q, row.b, row.s_q, row.s_kv) for row in rows if row.page_size == mla_rows.PEER_PAGE_SIZE}
    assert of_64 == {(row.h_q, row.b, row.s_q, row.s_kv) for row in rows if row.page_size == 16}
    assert {(16, 64, 1, 4096), (16, 128, 1, 32768), (128, 128, 2, 32768), (128, 1, 1, 32768), (16, 4, 1, 32768)} <= of_64
    assert [row.name() for row in mla_rows.selected(parse("--mla", "--rows", "b=64 .*s_kv=4096", "--mla-page-sizes", "64"))] == [
        "mla b=64 h=16/1 s_q=1 s_kv=4096 page=64"]


@pytest.mark.parametrize("wrong", ["0", "64,x", "-16"])
def test_wrong_pages_of_latent_rows_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as refused:
        parse("--mla-page-sizes", wrong)
    assert refused.value.code == 2 and "--mla-page-sizes" in capsys.readouterr().err


def test_latents_are_read_once_and_multiplied_twice():
    row = mla_rows.Spec(16, 2, 100, s_q=3, page_size=16)
    assert row.bytes() == 2 * 2 * (100 * 576 + 3 * 16 * (576 + 512)) and row.pages_each == 7 and row.causal
    assert row.products() == 2 * 2 * 16 * (98 + 99 + 100) * (576 + 512)
    entry = mla_rows.entry(row, {"fa": 10.0, "flashmla": 12.5}, cold=True)
    assert entry["d_qk"] == 576 and entry["d_v"] == 512 and entry["h_kv"] == 1 and entry["variant"] == "value_in_key+cold"
    assert entry["tbps"]["fa"] == pytest.approx(row.bytes() / 1e7, abs=1e-3)
    assert entry["tflops"]["flashmla"] == pytest.approx(row.products() / 12.5e6, abs=0.1)
    lines = []
    mla_rows.print_entry(entry, lines.append)
    mla_rows.print_entry(mla_rows.entry(row, {"fa": 10.0}), lines.append)
    assert "of the best 1.25 cold" in lines[0] and "best" not in lines[1] and "cold" not in lines[1]


def test_latent_rows_are_a_part_of_their_own():
    row = mla_rows.Spec(16, 64, 4096)
    decodes = {"decode": [{"b": 1}], "decode_templates": "old", "templates": "old"}
    first = decode_rows.merged(decodes, [mla_rows.entry(row, {"fa": 9.0})], "one", {}, {"mla_commit": "c"}, mla_rows.PART)
    assert first["decode"] == [{"b": 1}] and first["mla_templates"] == "one" and first["mla"][0]["us"] == {"fa": 9.0}
    second = decode_rows.merged(first, [mla_rows.entry(row, {"fa": 8.0, "flashmla": 9.0})], "one", {}, {}, mla_rows.PART)
    assert [entry["us"]["fa"] for entry in second["mla"]] == [8.0] and {"mla", "mla_templates", "mla_commit"} <= set(mla_rows.KEYS)
    assert decode_rows.summary(second["mla"]) == pytest.approx(9 / 8, abs=1e-2)
    assert any("mla" in text for text in decode_rows.warnings("two", "", second))
