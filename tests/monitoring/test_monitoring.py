"""Metrics, rules and dashboard against each other, and all of them against a real Prometheus that scrapes a real server."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from monitored_run import ROOT, RULES, Prometheus, eventually, running, training

MONITORING = ROOT / "deploy" / "monitoring"
RULE_TESTS = Path(__file__).resolve().parent / "headwater.rules.test.yaml"
METRIC = re.compile(r"(?<![\w:.])(?:headwater|process)_[a-z0-9_]+")
# Metrics that this server does not serve: those of groups (tests/integration/group_join_test.cc has them), and of TLS
# (test_logs.py).
OF_OTHERS = {"headwater_rank_seconds_total", "headwater_tls_certificate_expiry_timestamp_seconds"}
RECORDED = re.compile(r"headwater:[a-z0-9_:]+")

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool (Debian's and Ubuntu's package prometheus)",
)


def promtool(*arguments: object, text: str | None = None) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def expressions() -> dict[str, str]:
    """The dashboard's expressions with Grafana's variables filled in, by `title: legend`."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    found = {}
    for panel in panels:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$job", ".*").replace("$instance", ".*").replace("$__rate_interval", "20s")
            assert "$" not in expression, expression
            found[f"{panel['title']}: {target['legendFormat']}"] = expression
    return found


def families_in(text: str) -> set[str]:
    """Names of metrics, without what histograms add to theirs."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in METRIC.findall(text)}


def documented() -> set[str]:
    return set(re.findall(r"^\| `([a-z0-9_]+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))


def alert_names() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


def test_generated_files_are_as_generated():
    subprocess.run([sys.executable, MONITORING / "generate.py", "--check"], check=True)


def test_rules_and_dashboard_use_documented_metrics_only():
    known = documented()
    assert len(known) > 40
    for name, expression in expressions().items():
        used = families_in(expression)
        assert used and used <= known, name
    rules = re.sub(r"^ *(- alert|- record|summary|description|runbook_url):.*$|#.*$", "", RULES.read_text(), flags=re.MULTILINE)
    assert families_in(rules) <= known
    recorded = set(re.findall(r"- record: (\S+)", RULES.read_text()))
    assert set(RECORDED.findall(rules)) <= recorded


def test_the_dashboard_shows_every_metric():
    shown = set().union(*(families_in(expression) for expression in expressions().values()))
    assert documented() - shown == set()


def test_panels_do_not_overlap():
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        own = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not own & cells
        cells |= own


@pytest.mark.parametrize("alert", alert_names())
def test_each_alert_has_its_paragraph_and_its_test(alert):
    rule = RULES.read_text().split(f"- alert: {alert}\n")[1].split("- alert: ")[0]
    assert f"runbook_url: docs/alerts.md#{alert.lower()}\n" in rule
    paragraph = (ROOT / "docs" / "alerts.md").read_text().split(f"\n## {alert}\n")
    assert len(paragraph) == 2 and len(paragraph[1].split("\n#")[0].split()) > 20
    assert alert in RULE_TESTS.read_text().split("exp_samples:", 1)[1]


@needs_prometheus
def test_rules_hold_what_their_tests_say():
    assert "SUCCESS" in promtool("test", "rules", RULE_TESTS)
    assert f"{RULES.read_text().count('- record: ') + len(alert_names())} rules found" in promtool("check", "rules", RULES)


@needs_prometheus
def test_a_real_prometheus_sees_a_real_run():
    with running() as server, Prometheus(server) as prometheus, training(server.address) as steps:
        promtool("check", "config", prometheus.config)
        # Conventions of names and units, of what is really served.
        assert promtool("check", "metrics", text=server.metrics_page()).strip() == ""

        eventually(lambda: steps() >= 4, "four steps")
        # The scrapes that succeed: one that comes later than the short interval allows, on a busy machine, is none.
        eventually(lambda: prometheus.query('sum(sum_over_time(up{job="headwater"}[1h])) >= 12'), "scrapes")
        steps()  # nothing has ended the training
        # A rate needs two scrapes after the first event.
        for phase in ("upload", "queue", "compute", "download", "commit"):
            eventually(lambda phase=phase: prometheus.query(f"rate(headwater_{phase}_seconds_count[20s]) > 0"), phase)

        scraped = {re.sub(r"_(bucket|sum|count)$", "", name) for name in prometheus.get("label/__name__/values")}
        wanted = documented() | set(re.findall(r"- record: (\S+)", RULES.read_text()))
        assert wanted - scraped == OF_OTHERS
        # Nothing is served that the document does not know.
        assert {name for name in scraped if name.startswith(("headwater_", "process_"))} <= documented()

        # Every panel shows something, except those that only refusals, groups or TLS fill.
        for name, expression in expressions().items():
            result = prometheus.query(expression)
            assert result or name.startswith(("Calls refused", "Ranks of a group", "Certificates")), f"{name}: {expression}"
        value = {
            name: float(prometheus.query(f"sum({name})")[0]["value"][1])
            for name in (
                "headwater_product_flops_per_second",
                "headwater_product_flops_total",
                "headwater_compute_busy_seconds_total",
            )
        }
        reached = value["headwater_product_flops_total"] / value["headwater_compute_busy_seconds_total"]
        assert 0 < reached < 2 * value["headwater_product_flops_per_second"]  # the measurement was no fantasy
        for transport in ("grpc", "shared_memory"):
            assert prometheus.query(f'headwater_transport_micro_batches_total{{transport="{transport}"}} > 0')
        for outcome in ("committed", "staged", "replayed", "discarded"):
            assert prometheus.query(f'headwater_micro_batches_total{{outcome="{outcome}"}} > 0')

        def rules() -> list[dict]:
            return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

        eventually(lambda: all(rule["health"] == "ok" for rule in rules()), "rules")
        assert len(rules()) == RULES.read_text().count("- record: ") + len(alert_names())
        assert prometheus.query('ALERTS{alertstate="firing"}') == []
