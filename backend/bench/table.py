"""The report as text that fits a terminal."""

from __future__ import annotations

from backend.bench.figures import STEP_PARTS


def _spread(value: dict, scale: float = 1.0, digits: int = 1) -> str:
    median, low, high = (value[key] * scale for key in ("median", "low", "high"))
    text = f"{median:.{digits}f}"
    return text if low == high else f"{text} ({low:.{digits}f}–{high:.{digits}f})"


def _cell(found: dict, key: str, scale: float = 1.0, digits: int = 1) -> str:
    """ "": the figure does not belong to this workload."""
    return _spread(found[key], scale, digits) if key in found else ""


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def render(report: dict) -> str:
    machine, settings = report["machine"], report["settings"]
    loads = report["load_average"]
    lines = [
        f"{settings['model']} · {settings['dtype']} · {settings['input_tokens']} in / {settings['output_tokens']} out",
        f"{settings['rounds']} rounds, engines in turn · median (lowest–highest)",
        f"{machine['cpu']} · {machine['cores']} cores, {settings['threads']} threads · torch {machine['torch']} · "
        f"transformers {machine['transformers']} · {report['started']}",
    ]
    if loads:
        lines.append(f"load average before a turn: {min(loads):.1f}–{max(loads):.1f}")
        if max(loads) > machine["cores"]:
            lines.append("other work ran on this machine: compare engines with each other, not with other runs")
    rows = [["workload", "engine", "tok/s", "TTFT ms", "TPOT ms", "% of read roof", "% of limit", "ours ÷ this"]]
    for result in report["results"]:
        for name, found in result["engines"].items():
            rows.append(
                [
                    result["title"],
                    report["engines"][name]["title"],
                    _cell(found, "prompt_tok_s" if result["kind"] == "prefill" else "output_tok_s"),
                    _cell(found, "ttft_s", 1e3, 0),
                    _cell(found, "tpot_s", 1e3),
                    _cell(found, "share_of_read_roof", 100, 0),
                    _cell(found, "share_of_limit", 100, 0),
                    _cell(found, "ours_over_this", 1, 2),
                ]
            )
    lines += ["", *_columns(rows), "", "tok/s: output tokens until the last one, of a prefill the prompt's."]
    for result in report["results"]:
        if "least_s" in result:
            lines.append(
                f"{result['title']}: at least {_spread(result['least_s'], 1, 2)} s on this machine, reading and "
                "computing at their roofs side by side, a common prefix computed once"
            )
            continue
        lines.append(
            f"{result['title']}: a decode step moves {result['step_bytes'] / 1e6:.0f} MB and computes "
            f"{result['step_flops'] / 1e9:.2f} GFLOP; read roof {_spread(result['read_roof_tok_s'], 1, 0)} tok/s, "
            f"limit {_spread(result['limit_tok_s'], 1, 0)} tok/s ({result['bound_by']}-bound)"
        )
    for result in report["results"]:
        for reference, others in result["same_answers_as"].items():
            told = ", ".join(f"{report['engines'][n]['title']} {same} of {of}" for n, (same, of) in others.items())
            if told:
                lines.append(f"{result['title']}: token for token as {report['engines'][reference]['title']}: {told}")
    parts = [["decode step of KVScope, ms", "whole", *(p.removesuffix("_s") for p in STEP_PARTS), "rest"]]
    for result in report["results"]:
        found = result["engines"].get("kvscope", {}).get("decode_step")
        if found:
            cells = [found["step_s"], *(found[p] for p in STEP_PARTS), found["rest_s"]]
            parts.append([result["title"], *(f"{c * 1e3:.2f}" for c in cells)])
    if len(parts) > 1:
        lines += ["", *_columns(parts)]
    lines += [f"left out: {reason}" for reason in report["left_out"].values()]
    return "\n".join(lines)
