"""Trace files as people have them, and broken ones."""

from __future__ import annotations

import pytest

from backend.workload.arrivals import MAX_REQUESTS, LoadError
from backend.workload.trace import parse, read

GOOD = [(0.0, 10, 5), (1.5, 20, 6)]


@pytest.mark.parametrize(
    "data",
    [
        b"time_s,input_tokens,output_tokens\n3,10,5\n4.5,20,6\n",
        b"\xef\xbb\xbftime_s, input_tokens, output_tokens\r\n3, 10, 5\r\n\r\n4.5, 20, 6\r\n",
        b"arrived_at,num_prefill_tokens,num_decode_tokens,more\n4.5,20,6,x\n3,10,5,y\n",  # not in order
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
        b"2023-11-16 18:15:46.5000000,10,5\n2023-11-16 18:15:48.0000000,20,6\n",
        b'{"timestamp": 3000, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
        b'\n{"timestamp": 4500, "input_length": 20, "output_length": 6}\n',
    ],
)
def test_the_formats_that_are_around(data):
    assert parse(data) == GOOD


def test_speed_stretches_time_only():
    assert parse(b"time_s,input_tokens,output_tokens\n3,10,5\n4.5,20,6\n", speed=3) == [(0.0, 10, 5), (0.5, 20, 6)]


HEAD = b"time_s,input_tokens,output_tokens\n"


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "no request"),
        (HEAD, "no request"),
        (b"when,in,out\n1,2,3\n", "no column time_s .* its columns: when, in, out"),
        (b"time_s,input_tokens\n1,2\n", "no column output_tokens"),
        (HEAD + b"1,2\n", "line 2 has 2 columns"),
        (HEAD + b"1,2,3\nnan,2,3\n", "line 3: time_s is nan"),
        (HEAD + b"1,inf,3\n", "line 2: input_tokens is inf"),
        (HEAD + b"1,-2,3\n", "line 2: input_tokens must be a whole number"),
        (HEAD + b"1,2.5,3\n", "must be a whole number"),
        (HEAD + b"1,2,\n", "line 2: output_tokens '' is no number"),
        (HEAD + b"soon,2,3\n", "'soon' is no number"),
        (HEAD + "1,2,3\n".encode("utf-16"), "not UTF-8"),
        (HEAD + b"1,2,3\0\n", "null bytes"),
        (b'{"time_s": 1}\n', "line 1 has no column input_tokens"),
        (b'{"time_s": 1, "input_tokens": 1, "output_tokens": 1}\n{broken\n', "line 2 is no JSON"),
        (b'{"time_s": true, "input_tokens": 1, "output_tokens": 1}\n', "time_s is nan"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-99-99 10:00:00,1,1\n", "is no date"),
        (HEAD + b"1,1,1\n99999999,1,1\n", "lasts"),
        (HEAD + b"1,1,1\n" * (MAX_REQUESTS + 1), "more than 20,000 requests"),
        (b"x" * 70_000 + b"\n", "this is no trace|no column"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(data, words):
    with pytest.raises(LoadError, match=words):
        parse(data)


@pytest.mark.parametrize("speed", [0, -1, float("nan")])
def test_an_impossible_speed_is_refused(speed):
    with pytest.raises(LoadError, match="speed"):
        parse(HEAD + b"1,1,1\n", speed=speed)


def test_a_file_of_ten_million_rows_is_not_even_read_in(tmp_path):
    path = tmp_path / "huge.csv"
    path.write_bytes(HEAD + b"0,1,1\n" * 10_000_000)
    with pytest.raises(LoadError, match="more than 32 MiB"):
        read(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(LoadError, match=r"none\.csv cannot be read: No such file"):
        read(tmp_path / "none.csv")
