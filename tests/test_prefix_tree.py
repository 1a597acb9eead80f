"""The prefix tree against the plainest way to make it, on what a scripted engine and a foreign one tell."""

from __future__ import annotations

from backend import events, fold, prefix_tree
from backend.hub import Hub
from pages.widgets import tables
from tests.scripted_engine import ScriptedEngine

PARENT, BLOCK, HASH, HOLDERS, HELD, COPIES, SIZE, CHILDREN, POSITION, LOST, TEXT = range(11)


def worked(steps: int = 160, **options) -> tuple[Hub, ScriptedEngine]:
    hub = Hub()
    engine = ScriptedEngine(hub.publish, **{"blocks": 64, "running": 8, "seed": 5} | options)
    engine.hello()
    for _ in engine.run(steps):
        pass
    return hub, engine


def foreign(*rows: tuple[int, str, str], removed: tuple[int, ...] = (), texts: tuple[str, ...] = ()) -> Hub:
    """A hub that heard of cells [cell, hash, parent]."""
    hub, model, device = Hub(), events.ModelInfo(name="m"), events.DeviceInfo()
    hub.publish(events.Hello(seq=1, epoch="e", model=model, device=device, block_size=16, num_blocks=32))
    hub.publish(events.Resident(seq=2, stored=[row[0] for row in rows]))
    hub.publish(events.Sealed(seq=3, blocks=[(*row, 0, 0) for row in rows], texts=list(texts)))
    hub.publish(events.Resident(seq=4, removed=list(removed)))
    return hub


def test_every_cached_block_stands_under_its_parent():
    hub, _ = worked()
    tree = hub.tree()
    state = hub.read(lambda state: fold.State(blocks=state.blocks, num_blocks=state.num_blocks))
    sealed = [block for block in range(state.num_blocks) if state.blocks.sealed[block]]
    hashes = {hub.block(block)["hash"]: block for block in sealed}
    nodes = tree["nodes"]
    assert {node[HASH] for node in nodes} == set(hashes) and tree["left_out"] == 0
    assert tree["hashes"] == tree["blocks"] == len(sealed) > 20
    assert tree["branching"] > 0 and any(node[HELD] > 1 for node in nodes)
    for i, node in enumerate(nodes):
        block = hub.block(node[BLOCK])
        above = block["chain"][-2] if len(block["chain"]) > 1 else ""
        assert node[PARENT] < i
        assert (nodes[node[PARENT]][HASH] if node[PARENT] >= 0 else "") == (above if above in hashes else "")
        assert node[HOLDERS] == block["owners"][: prefix_tree.HOLDERS] and node[HELD] == len(block["owners"])
        assert node[TEXT] == block["text"][: prefix_tree.TEXT]
        below = [other for other in nodes if other[PARENT] == i]
        assert node[CHILDREN] == len(below)
        assert node[SIZE] == 1 + sum(other[SIZE] for other in below)


def test_a_tree_that_is_too_large_keeps_its_largest_branches():
    hub, _ = worked()
    whole = hub.tree()
    state, texts = hub._state, hub._texts
    few = prefix_tree.picture(texts, state, shown=10)
    assert len(few["nodes"]) == 10 and few["left_out"] == whole["hashes"] - 10
    assert few["hashes"] == whole["hashes"]
    sizes = sorted((node[SIZE] for node in whole["nodes"]), reverse=True)
    assert sorted((node[SIZE] for node in few["nodes"]), reverse=True) == sizes[:10]
    assert all(node[PARENT] < i for i, node in enumerate(few["nodes"]))


def test_copies_are_one_node_and_lost_branches_are_marked():
    hub = foreign((0, "a", ""), (1, "b", "a"), (2, "b", "a"), (3, "c", "b"), (4, "x", "gone"), removed=(0,))
    nodes = {node[HASH]: node for node in hub.tree()["nodes"]}
    assert set(nodes) == {"b", "c", "x"}
    assert (nodes["b"][COPIES], nodes["b"][LOST], nodes["c"][LOST], nodes["x"][LOST]) == (2, 1, 0, 1)
    assert hub.tree()["roots"] == 0


def test_text_that_came_with_the_hash_is_told():
    hub = foreign((0, "a", ""), (1, "b", "a"), texts=("Once upon", " a time"))
    assert [node[TEXT] for node in hub.tree()["nodes"]] == ["Once upon", " a time"]
    late = Hub()
    late.ingest(*[events.encode(event) for event in (hub.snapshot(), *hub._texts.replay())])
    assert late.tree()["nodes"] == hub.tree()["nodes"]


def test_hashes_that_claim_each_other_do_no_harm():
    hub = foreign((0, "a", "b"), (1, "b", "a"), (2, "c", "c"), (3, "d", "c"))
    assert [node[HASH] for node in hub.tree()["nodes"]] == ["c", "d"]


def test_nothing_was_heard_yet():
    tree = Hub().tree()
    assert tree["nodes"] == [] and tree["hashes"] == 0


def test_the_table_says_what_the_tree_says():
    hub, _ = worked()
    tree = hub.tree()
    frame = tables.prefix_tree(tree)
    assert list(frame["hash"]) == [node[HASH] for node in tree["nodes"]]
    assert frame["depth"].max() >= 2 and (frame["depth"] == 0).sum() == sum(node[PARENT] < 0 for node in tree["nodes"])
    assert set(frame["parent's hash"]) <= {"", *frame["hash"]}
    assert len(tables.prefix_tree(Hub().tree())) == 0
