"""The speed checks as one table: tokens a second, and how near the measured roofs that is."""

from __future__ import annotations

from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """Of what `gpu_check.json` holds; figures that are missing are not in it, and no figure is guessed."""
    checks = result["checks"]
    roofs = checks.get("ceilings", {}).get("ceilings", {})
    copy, matmul = ((roofs.get(name) or {}).get("value") for name in ("copy", "matmul"))
    machine = result["machine"]
    name = machine.get("properties", {}).get("name", machine["device"])
    lines = [
        f"{name}, torch {machine.get('torch')}, transformers {machine.get('transformers')}, {machine.get('started')}"
        + (", REHEARSAL, not a GPU" if not str(machine["device"]).startswith("cuda") else ""),
        "",
        f"Roofs measured in this run: copy {_rate(copy, 'B/s')}, bf16 matmul {_rate(matmul, 'FLOP/s')}.",
        "",
        "| engine | shape | work | tokens/s | step ms | % of the roof |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for found in checks.values():
        for row in found.get("rows", []):
            if not isinstance(row, dict) or "tokens_per_s" not in row:
                continue
            if "way" in row:
                who, shape, work = f"transformers, {row['way']}", row["shape_name"], f"decode, {row['batch']} at once"
            elif "paths" in row:
                who, shape, work = f"KVScope, {row['paths']}", found["shape"], f"decode, {row['decode']} at once"
            elif "decode" in row and "shape" in found:
                who, shape, work = "KVScope", found["shape"], f"decode, {row['decode']} at once"
            elif "prefill" in row:
                who, shape, work = "KVScope", found["shape"], f"prefill, {row['prefill']} tokens"
            else:
                continue
            share = _share(row.get("bytes_per_s"), copy) or _share(row.get("flops_per_s"), matmul)
            step = row.get("step_ms", row.get("ms"))
            lines.append(f"| {who} | {shape} | {work} | {row['tokens_per_s']:.0f} | {step:.2f} | {share or '–'} |")
    return "\n".join(lines) + "\n"


def _share(value: float | None, roof: float | None) -> str:
    return f"{value / roof:.0%}" if value and roof else ""


def _rate(value: float | None, unit: str) -> str:
    return f"{value:.3g} {unit}" if value else "not measured"
