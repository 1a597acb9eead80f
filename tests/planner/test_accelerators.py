"""The accelerator catalogue: what stands in it, and what is refused when it is read."""

import csv

import pytest

from backend.planner import accelerators
from backend.planner.accelerators import FOLDER, find, load, measured, read
from backend.planner.errors import CatalogueError, UnknownName, UnsupportedDtype

COLUMNS = next(csv.reader((FOLDER / "accelerators.csv").open(encoding="utf-8")))
GOOD = {
    "key": "mine",
    "name": "My part",
    "vendor": "me",
    "memory_gb_printed": "16",
    "bandwidth_gb_per_s": "500",
    "bf16_tflops": "100",
    "fp8_tflops": "200",
    "source": "its data sheet",
    "verified": "yes",
}


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """Writes rows to a catalogue of one's own, which `load` then reads."""
    monkeypatch.setenv(accelerators.OWN_FOLDER, str(tmp_path))

    def write(*rows: dict[str, str]):
        path = tmp_path / "accelerators.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        load.cache_clear()
        return path

    yield write
    load.cache_clear()


def test_enough_parts_each_with_a_source():
    rows = load()
    assert len(rows) >= 40
    assert all(row.source and row.verified in ("yes", "partly", "no") for row in rows.values())
    assert all(row.memory_basis for row in rows.values())


@pytest.mark.parametrize(
    ("key", "bf16", "fp8"),
    [("h100-sxm-80gb", 989.5e12, 1979e12), ("l40s", 362.05e12, 733e12), ("b200-sxm-180gb", 2250e12, 4500e12)],
)
def test_rates_that_data_sheets_print_sparse_are_dense_here(key, bf16, fp8):
    assert find(key).rate("bf16") == pytest.approx(bf16)
    assert find(key).rate("fp8") == pytest.approx(fp8)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("h100-sxm", "h100-sxm-80gb"),
        ("80 GB H100", "h100-sxm-80gb"),
        ("48 GB L40S", "l40s"),
        ("H200 SXM", "h200-sxm-141gb"),
        ("nvidia rtx pro 6000 blackwell", "rtx-pro-6000-blackwell"),
        ("T4", "t4"),
    ],
)
def test_found_by_what_people_say(said, key):
    assert find(said).key == key


def test_an_unknown_name_suggests_near_ones():
    with pytest.raises(UnknownName, match="a100"):
        find("a1000-sxm")


@pytest.mark.parametrize(("key", "dtype"), [("t4", "bf16"), ("a100-sxm-80gb", "fp8"), ("h100-sxm-80gb", "nvfp4")])
def test_arithmetic_that_a_part_has_not_is_refused(key, dtype):
    with pytest.raises(UnsupportedDtype, match=dtype):
        find(key).rate(dtype)


def test_an_own_file_adds_and_replaces(own_file):
    own_file(GOOD, GOOD | {"key": "t4", "name": "T4, as I measured it", "bandwidth_gb_per_s": "250"})
    assert find("mine").memory_bytes == 16 * 2**30
    assert find("t4").bandwidth_bytes_per_s == 250e9
    assert len(load()) == len(read(FOLDER / "accelerators.csv")) + 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fp8_tflops": "400"}, "sparse"),
        ({"fp16_tflops": "400"}, "fp16"),
        ({"bandwidth_gb_per_s": ""}, "bandwidth_gb_per_s"),
        ({"bandwidth_gb_per_s": "-1"}, "positive"),
        ({"bandwidth_gb_per_s": "fast"}, "number"),
        ({"source": ""}, "source is missing"),
        ({"verified": "surely"}, "verified"),
        ({"memory_gb_printed": ""}, "memory"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named(own_file, change, words):
    path = own_file(GOOD | change)
    with pytest.raises(CatalogueError, match=words) as raised:
        read(path)
    assert "accelerators.csv, line 2" in str(raised.value)


def test_a_listed_exception_may_have_another_ratio(own_file):
    assert read(own_file(GOOD | {"fp8_tflops": "100", "ratio_exceptions": "fp8"}))["mine"].rate("fp8") == 100e12


def test_the_same_key_twice_is_refused(own_file):
    with pytest.raises(CatalogueError, match="twice"):
        read(own_file(GOOD, GOOD))


def test_this_machine_plans_like_any_part():
    machine = measured(
        "Some CPU", memory_bytes=8 * 2**30, read_bytes_per_s=20e9, flops_per_s={"float32": 4e11}, source="measured here"
    )
    assert machine.ridge_flop_per_byte("fp32") == 20
    assert machine.kind == "measured"
