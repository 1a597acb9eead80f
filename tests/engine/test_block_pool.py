"""The pool's contract, by example and against a brute-force account."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engine.block_pool import BlockPool, OutOfBlocks
from backend.engine.contiguous_pool import ContiguousPool


def test_a_fresh_pool_is_free_in_order():
    pool = BlockPool(8)
    assert (pool.free_count, pool.used_count, pool.cached_count) == (8, 0, 0)
    assert pool.eviction_order() == list(range(8))
    assert pool.refs == [0] * 8


def test_asking_for_too_much_changes_nothing():
    pool = BlockPool(4)
    pool.allocate(1)
    before = (pool.eviction_order(), list(pool.refs))
    with pytest.raises(OutOfBlocks, match="4 blocks asked for, 3 free"):
        pool.allocate(4)
    assert (pool.eviction_order(), pool.refs) == before


def test_blocks_are_distinct_and_come_back():
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(3)
    assert len(set(first + second)) == 5
    pool.release(first)
    pool.release(second)
    assert pool.free_count == 6


def test_draining_and_refilling_the_pool_keeps_every_block():
    pool = BlockPool(5)
    for _ in range(3):
        table = pool.allocate(5)
        assert pool.free_count == 0
        pool.release(table)
    assert sorted(pool.eviction_order()) == list(range(5))


def test_sharing_takes_a_block_out_of_the_middle_of_the_free_queue():
    pool = BlockPool(5)
    table = pool.allocate(3)
    for i, block in enumerate(table):
        pool.seal(block, bytes([i]))
    pool.release(table)
    order = pool.eviction_order()
    pool.share([table[1]])
    assert pool.eviction_order() == [b for b in order if b != table[1]]
    assert pool.cached_count == 2


def test_unhashed_blocks_are_reused_first_and_hashed_ones_last():
    pool = BlockPool(4)
    hashed, plain = pool.allocate(1), pool.allocate(1)
    pool.seal(hashed[0], b"a")
    pool.release(hashed)
    pool.release(plain)
    assert pool.eviction_order() == [plain[0], 2, 3, hashed[0]]


def test_the_end_of_a_chain_is_evicted_before_its_start():
    pool = BlockPool(3)
    table = pool.allocate(3)
    for i, block in enumerate(table):
        pool.seal(block, bytes([i]))
    pool.release(table)
    assert pool.eviction_order() == table[::-1]
    pool.allocate(1)
    assert pool.lookup([b"\0", b"\1", b"\2"]) == table[:2]


def test_releasing_twice_is_an_error():
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(table)


def test_a_reused_block_no_longer_answers_for_its_old_content():
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.seal(table[0], b"old")
    pool.release(table)
    assert pool.lookup([b"old"]) == table
    assert pool.allocate(1) == table
    assert pool.lookup([b"old"]) == []
    assert pool.evictions == 1


def test_equal_content_is_kept_once():
    pool = BlockPool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    assert pool.seal(first[0], b"same")
    assert not pool.seal(second[0], b"same")
    pool.release(second)
    assert pool.eviction_order()[0] == second[0], "the copy that answers nothing is reused first"


def test_without_a_prefix_cache_nothing_is_hashed_or_found():
    pool = BlockPool(2, prefix_cache=False)
    table = pool.allocate(1)
    assert not pool.seal(table[0], b"a")
    assert pool.lookup([b"a"]) == []
    pool.release(table)
    assert pool.cached_count == 0


def test_clear_refuses_while_blocks_are_held_and_forgets_every_hash_when_idle():
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.seal(table[0], b"a")
    with pytest.raises(ValueError, match="2 blocks are held"):
        pool.clear()
    pool.release(table)
    pool.clear()
    assert pool.cached_count == 0 and pool.lookup([b"a"]) == []
    pool.check([])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.booleans(), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=120))
def test_any_history_keeps_every_block_accounted_for(blocks, prefix_cache, history):
    pool = BlockPool(blocks, prefix_cache)
    tables: list[list[int]] = []
    for action, number in history:
        if action == 0:
            try:
                tables.append(pool.allocate(number % 4 + 1))
            except OutOfBlocks:
                assert number % 4 + 1 > pool.free_count
        elif action == 1 and tables:
            pool.release(tables.pop(number % len(tables)))
        elif action == 2 and tables:
            table = tables[number % len(tables)]
            unsealed = [b for b in table if pool.hash_of[b] is None]
            if unsealed:
                pool.seal(unsealed[0], bytes([number % 16]))
        elif action == 3:
            found = pool.lookup([bytes([number % 16])])
            pool.share(found)
            if found:
                tables.append(found)
        elif action == 4 and not tables:
            pool.clear()
        pool.check(tables)
        held = {b for table in tables for b in table}
        assert pool.used_count == len(held)
        assert pool.free_count + pool.used_count == blocks


# ---- contiguous


def test_one_piece_goes_into_the_first_hole_that_is_large_enough():
    pool = ContiguousPool(10)
    first, second, third = pool.allocate(3), pool.allocate(2), pool.allocate(4)
    assert (first, second, third) == ([0, 1, 2], [3, 4], [5, 6, 7, 8])
    pool.release(second)
    assert pool.free_count == 3 and pool.largest_hole == 2 and not pool.fits(3)
    with pytest.raises(OutOfBlocks, match="3 neighbouring blocks asked for; 3 are free, the largest hole has 2"):
        pool.allocate(3)
    pool.release(first)
    assert pool.largest_hole == 5 and pool.allocate(4) == [0, 1, 2, 3]
    pool.check([[0, 1, 2, 3], third])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_holes_are_what_nobody_holds(moves):
    pool, held = ContiguousPool(24), []
    for count, take in moves:
        if take and pool.fits(count):
            held.append(pool.allocate(count))
        elif held:
            pool.release(held.pop(count % len(held)))
        pool.check(held)
        assert pool.largest_hole == BlockPool.largest_hole.fget(pool)
