#!/usr/bin/env python3
"""generate.py [--check]: writes what follows from other files of this folder.

With --check it writes nothing, and fails if a file is not as it would be written.

prometheus-rule.yaml     headwater.rules.yaml as a PrometheusRule, for Prometheus' operator
dashboard.json           Grafana's dashboard, from the panels below
"""

import argparse
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SELECTOR = 'job=~"$job",instance=~"$instance"'

RULE_HEAD = """\
# Made by deploy/monitoring/generate.py from headwater.rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: headwater
  labels:
    app.kubernetes.io/name: headwater
    app.kubernetes.io/component: monitoring
spec:
"""


def rate(metric: str, labels: str = "") -> str:
    return f"rate({metric}{{{SELECTOR}{',' + labels if labels else ''}}}[$__rate_interval])"


def total(expression: str, by: str) -> str:
    return f"sum by (instance, {by}) ({expression})"


def gauge(metric: str, labels: str = "") -> str:
    return f"{metric}{{{SELECTOR}{',' + labels if labels else ''}}}"


def quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (instance, le) ({rate(metric + '_bucket')}))"


def mean(metric: str) -> str:
    return f"{rate(metric + '_sum')} / ({rate(metric + '_count')} > 0)"


# Rows of panels: (title, unit, meaning, [(expression, legend)], type of panel). {{x}} in a legend is the series' label.
ROWS = [
    (
        "Is it well?",
        [
            ("Serving", "bool_yes_no", "Whether health is SERVING.", [(gauge("headwater_serving"), "{{instance}}")], "stat"),
            (
                "Up since",
                "s",
                "Time since the process began.",
                [(f"time() - {gauge('process_start_time_seconds')}", "{{instance}}")],
                "stat",
            ),
            ("Heads", "short", "Heads that exist.", [(gauge("headwater_heads"), "{{instance}}")], "stat"),
            ("Version", "none", "Version and engine.", [(gauge("headwater_build_info"), "{{version}}, {{engine}}")], "stat"),
            (
                "Certificates end in",
                "s",
                "Time until the first certificate of the file ends, of the server's own and of the authorities of its clients.",
                [(f"{gauge('headwater_tls_certificate_expiry_timestamp_seconds')} - time()", "{{instance}} {{certificate}}")],
                "timeseries",
            ),
            (
                "Not saved for",
                "s",
                "Time since the oldest change of a head's weights that no checkpoint has.",
                [(gauge("headwater_unsaved_change_age_seconds"), "{{instance}}")],
                "timeseries",
            ),
            (
                "Calls refused",
                "ops",
                "Failed calls a second by the reason that was sent; docs/errors.md explains each.",
                [(total(rate("headwater_refusals_total"), "reason") + " > 0", "{{reason}}")],
                "timeseries",
            ),
            (
                "Calls",
                "ops",
                "Finished calls a second by method.",
                [(total(rate("headwater_requests_total"), "method"), "{{method}}")],
                "timeseries",
            ),
        ],
    ),
    (
        "How much is done?",
        [
            (
                "Tokens",
                "short",
                "Rows a second that were not ignored.",
                [(total(rate("headwater_tokens_total"), "loss"), "{{loss}}")],
                "timeseries",
            ),
            (
                "Micro-batches",
                "ops",
                "By what became of them.",
                [(total(rate("headwater_micro_batches_total"), "outcome"), "{{outcome}}")],
                "timeseries",
            ),
            (
                "Steps and contributions",
                "ops",
                "Steps closed, contributions added and dropped, a second.",
                [
                    (total(rate("headwater_steps_total"), "how"), "steps {{how}}"),
                    (rate("headwater_commits_total"), "contributions added"),
                    (rate("headwater_discards_total"), "contributions discarded"),
                    (total(rate("headwater_session_discards_total"), "how"), "dropped with their session, {{how}}"),
                ],
                "timeseries",
            ),
            (
                "Utilisation of the floor",
                "percentunit",
                "Rate of the micro-batches' matrix products while the engine was busy, over that of bare products on this machine; "
                "and the share of the time in which it was busy.",
                [
                    (
                        f"{rate('headwater_product_flops_total')} / ({rate('headwater_compute_busy_seconds_total')} > 0) / "
                        f"{gauge('headwater_product_flops_per_second')}",
                        "of the floor, while busy",
                    ),
                    (rate("headwater_compute_busy_seconds_total"), "busy"),
                ],
                "timeseries",
            ),
            (
                "Ranks of a group",
                "percentunit",
                "Share of the time in which each process of a group computed, waited for others, and communicated; a rank that "
                "computes while all others wait has too large a shard, or a slower machine.",
                [(rate("headwater_rank_seconds_total"), "rank {{rank}}: {{activity}}")],
                "timeseries",
            ),
            (
                "Chunk fill",
                "percentunit",
                "How full token chunks are, on average; low: micro-batches too small for the engine.",
                [(mean("headwater_token_chunk_fill_ratio"), "{{instance}}")],
                "timeseries",
            ),
            (
                "Rows that are not finite",
                "short",
                "Rows a second with a NaN or an infinity in loss or gradient.",
                [(rate("headwater_non_finite_rows_total"), "{{instance}}")],
                "timeseries",
            ),
        ],
    ),
    (
        "Where does the time go?",
        [
            (
                "A micro-batch, on average",
                "s",
                "Phases overlap: the engine begins before the last row is there.",
                [(mean(f"headwater_{phase}_seconds"), phase) for phase in ("upload", "queue", "compute", "download", "commit")],
                "timeseries",
            ),
            (
                "A micro-batch, 99th percentile",
                "s",
                "By phase.",
                [
                    (quantile(0.99, f"headwater_{phase}_seconds"), phase)
                    for phase in ("upload", "queue", "compute", "download", "commit")
                ],
                "timeseries",
            ),
            (
                "Calls, 99th percentile",
                "s",
                "Time from a call's start to its end.",
                [
                    (
                        f"histogram_quantile(0.99, sum by (instance, le, method) ({rate('headwater_request_seconds_bucket')}))",
                        "{{method}}",
                    )
                ],
                "timeseries",
            ),
            (
                "Waiting",
                "short",
                "Waiting work, and the queue's room.",
                [
                    (gauge("headwater_queue_depth"), "micro-batches for the engine"),
                    (gauge("headwater_max_queue_depth"), "most that may"),
                    (gauge("headwater_waiting_calls"), "calls for a step"),
                    (gauge("headwater_waiting_contributions"), "contributions for lower ids"),
                ],
                "timeseries",
            ),
            (
                "Early starts",
                "ops",
                "Micro-batches that began before all of their rows had come, and those of them that had to wait after all.",
                [(rate("headwater_early_starts_total"), "early"), (rate("headwater_stalls_total"), "stalled")],
                "timeseries",
            ),
        ],
    ),
    (
        "How do rows travel?",
        [
            (
                "Tensor bytes",
                "Bps",
                "By path and direction.",
                [(total(rate("headwater_bytes_total"), "transport, direction"), "{{transport}} {{direction}}")],
                "timeseries",
            ),
            (
                "Micro-batches by path",
                "ops",
                "The path of their hidden states; gRPC from a trainer on the same host means that a better one failed.",
                [(total(rate("headwater_transport_micro_batches_total"), "transport"), "{{transport}}")],
                "timeseries",
            ),
            (
                "Connections and sessions",
                "short",
                "Open ones; and calls that still run although their client has gone.",
                [
                    (gauge("headwater_connections"), "connections"),
                    (gauge("headwater_max_connections"), "most connections"),
                    (gauge("headwater_sessions"), "sessions"),
                    (gauge("headwater_abandoned_calls"), "calls whose client has gone"),
                ],
                "timeseries",
            ),
            (
                "Ended",
                "ops",
                "Sessions by how they ended, connections that were refused or dropped, TLS handshakes that failed.",
                [
                    (total(rate("headwater_sessions_ended_total"), "how"), "sessions {{how}}"),
                    (rate("headwater_connections_refused_total"), "connections refused"),
                    (rate("headwater_connections_dropped_total"), "connections dropped"),
                    (rate("headwater_tls_handshake_failures_total"), "handshakes failed"),
                ],
                "timeseries",
            ),
            (
                "Traces",
                "ops",
                "Calls that asked to be traced, by whether they were written.",
                [(total(rate("headwater_traces_total"), "outcome"), "{{outcome}}")],
                "timeseries",
            ),
        ],
    ),
    (
        "Where does the memory go?",
        [
            (
                "Device memory by purpose",
                "bytes",
                "Memory of the heads' plans, and its limit.",
                [
                    (gauge("headwater_memory_planned_bytes"), "{{purpose}}"),
                    (gauge("headwater_memory_budget_bytes"), "budget"),
                ],
                "timeseries",
            ),
            (
                "Host memory",
                "bytes",
                "Memory of the process, and the parts of rows, uploads and held contributions.",
                [
                    (gauge("process_resident_memory_bytes"), "resident"),
                    (gauge("headwater_row_memory_bytes"), "rows, {{state}}"),
                    (gauge("headwater_held_bytes"), "held"),
                    (gauge("headwater_join_bytes"), "joined"),
                    (gauge("headwater_upload_bytes"), "weight uploads"),
                    (gauge("headwater_in_flight_bytes"), "reserved in flight"),
                    (gauge("headwater_max_in_flight_bytes"), "most in flight"),
                ],
                "timeseries",
            ),
            (
                "Clients' regions",
                "bytes",
                "Memory of clients on this host that is open here.",
                [(gauge("headwater_region_bytes"), "{{kind}}")],
                "timeseries",
            ),
            (
                "Regions",
                "short",
                "How many of them.",
                [(gauge("headwater_regions"), "{{kind}}")],
                "timeseries",
            ),
            (
                "Heads that came and went",
                "short",
                "Since the server's start: heads brought back, checkpoints passed over, heads deleted because they were unused.",
                [
                    (gauge("headwater_restored_heads_total"), "restored"),
                    (gauge("headwater_skipped_checkpoints_total"), "checkpoints skipped"),
                    (gauge("headwater_expired_heads_total"), "expired"),
                ],
                "timeseries",
            ),
        ],
    ),
]


def panel(number: int, x: int, y: int, width: int, height: int, spec: tuple) -> dict:
    title, unit, description, targets, kind = spec
    source = {"type": "prometheus", "uid": "${datasource}"}
    result = {
        "id": number,
        "type": kind,
        "title": title,
        "description": description,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(targets)
        ],
    }
    if kind == "stat":
        result["options"] = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "textMode": "value_and_name" if unit == "none" else "auto",
        }
        if unit == "none":
            result["options"]["textMode"] = "name"
    else:
        result["fieldConfig"]["defaults"]["min"] = 0
        result["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return result


def variable(name: str, label: str, query: str) -> dict:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> str:
    panels, number, y = [], 0, 0
    for title, specs in ROWS:
        number += 1
        panels.append(
            {
                "id": number,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        x = below = 0
        for spec in specs:
            width, height = (6, 4) if spec[4] == "stat" else (12 if len(specs) % 3 else 8, 8)
            if x + width > 24:
                x, y = 0, y + below
                below = 0
            number += 1
            panels.append(panel(number, x, y, width, height, spec))
            x, below = x + width, max(below, height)
        y += below
    document = {
        "title": "Headwater",
        "uid": "headwater",
        "tags": ["headwater"],
        "description": "Made by deploy/monitoring/generate.py. Metrics: docs/metrics.md.",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "utc",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                variable("job", "Job", "label_values(headwater_build_info, job)"),
                variable("instance", "Instance", 'label_values(headwater_build_info{job=~"$job"}, instance)'),
            ]
        },
        "panels": panels,
    }
    return json.dumps(document, indent=1) + "\n"


def prometheus_rule() -> str:
    """The groups as they are, two spaces deeper; comments stay behind."""
    lines = (FOLDER / "headwater.rules.yaml").read_text(encoding="utf-8").splitlines()
    return RULE_HEAD + "".join(f"  {line}\n" for line in lines if not line.lstrip().startswith("#"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not as it would be written")
    check = parser.parse_args().check
    status = 0
    for name, text in (("prometheus-rule.yaml", prometheus_rule()), ("dashboard.json", dashboard())):
        file = FOLDER / name
        if not check:
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file} is not what {Path(__file__).name} makes of its sources; run it", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
